"""Record of a program's own loop: begin, steps, and the end, which no call announces."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from gpumix.engine.engine import Engine
from gpumix.integrations.common.gather import gather_texts
from gpumix.integrations.common.run_recorder import RunRecorder, TrainingRecorder


class LoopRecorder(TrainingRecorder):
    """Counter of a loop's steps, recording steps if there is a folder. Made on all ranks.

    Args:
        folder: of the run's files; the first rank's counts.
        plans: the class taking the plan in the program.

    Attributes:
        done: steps, including steps of a resumed state.
    """

    def __init__(self, engine: Engine, folder: Path | None, plans: str) -> None:
        super().__init__()
        self.done = 0
        told = gather_texts(str(folder or ""), engine.comm, "the folder of the record")[0]
        self._folder = Path(told) if told else None
        self._engine: Engine | None = engine
        self._plans = plans
        self._losses: list[tuple[Tensor, Tensor | None]] = []  # of the current step
        self._norm: Tensor | None = None

    def computes(self) -> None:
        """Note a batch about to be computed. Collective, the first time: the record begins."""
        if self._recorded is None and self._folder is not None and self._engine is not None:
            self.begin(self._engine, self._folder, plans=self._plans, steps=None, done=self.done)
            self._end_with_program()
        super().computes()

    def _end_with_program(self) -> None:
        atexit.register(self.close)
        hook = sys.excepthook

        def failed(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self.fail(error)
            hook(kind, error, trace)

        sys.excepthook = failed

    def computed(self, loss: Tensor, weight: Tensor | None) -> None:
        """Note a backward of the loop.

        Args:
            weight: of the loss among the losses of all ranks; None for a loss of all ranks.
        """
        if self._recorded is not None:
            self._losses.append((loss.detach(), weight))
            self._recorded.batch()

    def note_gradient_norm(self, norm: Tensor) -> None:
        if self._recorded is not None:
            self._norm = norm

    def stepped(self, rate: float) -> None:
        """Note a step of the optimizer. Collective, if there is a record."""
        self.done += 1
        if self._recorded is None or not self._losses:
            return
        loss = torch.stack([self._whole(*one) for one in self._losses]).mean()
        self._recorded.step(self.done, loss=loss, learning_rate=rate, norm=self._norm)
        self._losses, self._norm = [], None

    def _taken(self) -> RunRecorder | None:
        # A finished record does not begin again; `atexit` keeps this object to the end.
        self._folder = self._engine = None
        return super()._taken()

    def _whole(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        """Return the loss of all ranks' samples, float64, without waiting for the device."""
        if weight is None:
            return loss.double()
        assert self._engine is not None, "there is a record"
        own = torch.where(weight > 0, loss.to(weight) * weight, 0.0)
        return self._engine.comm.all_reduce(own.reshape(1), "loss of a record")[0]
