"""Undo of the last steps: earlier engine state except weights and gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gpumix.engine.model.module_buffers import BufferCopies

# Steps that can be taken back: a bad step, and a step issued before the result was known.
MAX_UNDONE_STEPS = 2


@dataclass(frozen=True)
class StepUndo:
    """Copies of the buffers, and of `Engine.losses_counted`, from before a step."""

    buffers: BufferCopies
    losses_counted: torch.Tensor

    @classmethod
    def before(cls, keepers: Iterable[nn.Module], losses_counted: torch.Tensor) -> StepUndo:
        """Make the copies before a step; `keepers` are the modules with buffers."""
        return cls(BufferCopies(keepers), losses_counted)

    def after(self, earlier: tuple[StepUndo, ...]) -> tuple[StepUndo, ...]:
        """Return all undoable steps: the latest of `earlier` steps, and this step last."""
        self.buffers.keep_changed()
        return (*earlier, self)[-MAX_UNDONE_STEPS:]
