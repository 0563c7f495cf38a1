"""Skipped steps after an overflow of fp16 gradients, as reported to other libraries' loops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpumix.engine.engine import Engine


@dataclass(frozen=True, eq=False)
class SkippedStepProxy:
    """Stand-in for an optimizer, for Accelerate's query of a skipped last step."""

    engine: Engine
    optimizer: Optimizer

    @property
    def step_was_skipped(self) -> bool:
        return self.engine.overflowed and has_visible_skips(self.optimizer)


def has_visible_skips(optimizer: Optimizer) -> bool:
    """Return True if Accelerate learns of skipped steps; a fused optimizer is called for skipped
    steps too, so schedules advance."""
    return not getattr(optimizer, "_step_supports_amp_scaling", False)


def get_reported_norm(norm: Tensor, *, overflowed: bool) -> Tensor:
    """Return the gradient norm; infinite after an overflow, with the gradients gone."""
    return torch.full_like(norm, math.inf) if overflowed else norm


def zero_if_not_finite(norm: Tensor | float | None) -> Tensor | float:
    """Return the norm, or 0 if not finite, without waiting for the device."""
    if isinstance(norm, Tensor):
        return torch.where(torch.isfinite(norm), norm, torch.zeros_like(norm))
    return norm if norm is not None and math.isfinite(norm) else 0.0
