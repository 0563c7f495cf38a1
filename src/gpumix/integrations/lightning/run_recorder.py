"""A strategy's record for `gpumix top` and `gpumix report`, in addition to the trainer's log."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from gpumix.engine.engine import Engine
from gpumix.integrations.common.run_recorder import RunRecorder, TrainingRecorder


class FitRecorder(TrainingRecorder):
    """Record of a fit; a trainer without a logger has none."""

    def __init__(self) -> None:
        super().__init__()
        self._loss: Tensor | None = None  # of a step not recorded yet

    def begin(self, trainer: Any, engine: Engine, folder: Path | None) -> None:
        steps = trainer.estimated_stepping_batches
        self._recorded, self._loss = None, None
        if folder is not None and steps > 0:
            self._recorded = RunRecorder(
                engine,
                folder,
                plans=type(trainer.strategy).__name__,
                steps=None if math.isinf(steps) else int(steps),
                done=trainer.global_step,
            )

    def computed(self, loss: Tensor) -> None:
        self._loss = loss

    def step(self, number: int, *, learning_rate: float, norm: Tensor | float) -> None:
        if self._recorded is not None and self._loss is not None:
            loss, self._loss = self._loss, None
            self._recorded.step(number, loss=loss, learning_rate=learning_rate, norm=norm)
