"""The record of a loop that is the program's own: when it begins, what a step of it is, and how it
ends, of which nobody tells.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from gpumix.engine.engine import Engine
from gpumix.integrations.gathering import all_texts
from gpumix.integrations.recorded import Record, Recorded


class LoopRecord(Record):
    """Counts the steps of a loop, and records them if there is a folder. Made on all ranks.

    Args:
        folder: of the run's files; the first rank's is taken.
        plans: the class that takes the plan in the program.

    Attributes:
        done: steps; those too that a state brings which the loop goes on from.
    """

    def __init__(self, engine: Engine, folder: Path | None, plans: str) -> None:
        super().__init__()
        self.done = 0
        told = all_texts(str(folder or ""), engine.comm, "the folder of the record")[0]
        self._folder = Path(told) if told else None
        self._engine: Engine | None = engine
        self._plans = plans
        self._losses: list[tuple[Tensor, Tensor | None]] = []  # of the step under way
        self._norm: Tensor | None = None

    def computes(self) -> None:
        """A batch is about to be computed. Collective, the first time: the record begins."""
        if self._recorded is None and self._folder is not None and self._engine is not None:
            self._begin(self._folder, self._engine)
        super().computes()

    def _begin(self, folder: Path, engine: Engine) -> None:
        self._recorded = Recorded(engine, folder, plans=self._plans, steps=None, done=self.done)
        atexit.register(self.close)
        hook = sys.excepthook

        def failed(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self.fail(error)
            hook(kind, error, trace)

        sys.excepthook = failed

    def computed(self, loss: Tensor, weight: Tensor | None) -> None:
        """The loop went backward from a loss.

        Args:
            weight: what it counts for among those of all ranks; None where it is of all of them.
        """
        if self._recorded is not None:
            self._losses.append((loss.detach(), weight))
            self._recorded.batch()

    def clipped(self, norm: Tensor) -> None:
        if self._recorded is not None:
            self._norm = norm

    def stepped(self, rate: float) -> None:
        """The optimizer made a step. Collective, where there is a record."""
        self.done += 1
        if self._recorded is None or not self._losses:
            return
        loss = torch.stack([self._whole(*one) for one in self._losses]).mean()
        self._recorded.step(self.done, loss=loss, learning_rate=rate, norm=self._norm)
        self._losses, self._norm = [], None

    def _taken(self) -> Recorded | None:
        # What has ended does not begin again, and is known to the interpreter until that ends.
        self._folder = self._engine = None
        return super()._taken()

    def _whole(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        """The loss of all ranks' samples, float64; nothing waits for it."""
        if weight is None:
            return loss.double()
        assert self._engine is not None, "there is a record"
        own = torch.where(weight > 0, loss.to(weight) * weight, 0.0)
        return self._engine.comm.all_reduce(own.reshape(1), "loss of a record")[0]
