"""Skipped steps after an overflow of fp16 gradients, as reported to other libraries' loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpumix.engine.engine import Engine


class Skips:
    """Stand-in for an optimizer, for Accelerate's query of a skipped last step."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine = engine
        self._optimizer = optimizer

    @property
    def step_was_skipped(self) -> bool:
        return self._engine.overflowed and tells_of_skips(self._optimizer)


def tells_of_skips(optimizer: Optimizer) -> bool:
    """Return True if Accelerate learns of skipped steps; a fused optimizer is called for skipped
    steps too, so schedules advance."""
    return not getattr(optimizer, "_step_supports_amp_scaling", False)


def told_norm(norm: Tensor, *, overflowed: bool) -> Tensor:
    """Return the gradient norm; infinite after an overflow, with the gradients gone."""
    return torch.full_like(norm, math.inf) if overflowed else norm
