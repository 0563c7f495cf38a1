"""What the last steps changed in an engine beside weights and gradients, as it was before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gpumix.engine.buffers import BufferCopies

# Steps that can be taken back: one that was bad, and the one that was given before that was known.
MOST_TAKEN_BACK = 2


@dataclass(frozen=True)
class Undo:
    """Of one step: copies of the buffers, and `Engine.losses_counted`, from before it."""

    buffers: BufferCopies
    losses_counted: torch.Tensor

    @classmethod
    def before(cls, keepers: Iterable[nn.Module], losses_counted: torch.Tensor) -> Undo:
        """To be made before the step; `keepers` are the modules with buffers."""
        return cls(BufferCopies(keepers), losses_counted)

    def after(self, earlier: tuple[Undo, ...]) -> tuple[Undo, ...]:
        """What can be undone when the step is done: it last, after `earlier` ones."""
        self.buffers.keep_changed()
        return (*earlier, self)[-MOST_TAKEN_BACK:]
