"""Steps that are left out because fp16 gradients overflowed, as the loops of others hear of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpumix.engine.engine import Engine


class Skips:
    """Stands for an optimizer where Accelerate asks whether it left out its last step."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        self._engine = engine
        self._optimizer = optimizer

    @property
    def step_was_skipped(self) -> bool:
        return self._engine.overflowed and tells_of_skips(self._optimizer)


def tells_of_skips(optimizer: Optimizer) -> bool:
    """Whether Accelerate hears of steps that are left out: a fused optimizer is called for them
    too, so that schedules go on."""
    return not getattr(optimizer, "_step_supports_amp_scaling", False)


def told_norm(norm: Tensor, *, overflowed: bool) -> Tensor:
    """That of gradients which are not there any more is infinite."""
    return torch.full_like(norm, math.inf) if overflowed else norm
