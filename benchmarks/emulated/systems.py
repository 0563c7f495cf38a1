"""The systems on one rank's emulated device: an ordinary loop, which DDP and FSDP2 may distribute,
and gpumix.

All train the same model from the same weights with fused AdamW in fp32. `step` does all of one
step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import nn

import gpumix
from compared.systems import Exchanging, OnEngine, optimizer_of
from emulated.setting import Setting
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.schema.plan.plan import Plan

Batch = dict[str, torch.Tensor]


class System(Protocol):
    """`step` gives this rank's part of the global batch's loss."""

    def step(self, batch: Batch) -> torch.Tensor: ...


class Loop:
    """An ordinary training loop around a model that may be wrapped.

    Args:
        labels: those of the global batch, over which each sample's losses are averaged.
        micro_batches: their number; each rank cuts its own samples into so many, or into single
            ones if it has fewer.
        ranks: over how many gradients are averaged; losses count so many times for that. So the
            gradient is that of one process, however the samples are split.
        exchanging: what goes around each micro-batch.
        after_backward: called after the step's last backward.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        labels: int,
        micro_batches: int = 1,
        ranks: int = 1,
        exchanging: Exchanging = lambda last: nullcontext(),
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._labels = labels / ranks
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._exchanging = exchanging
        self._after_backward = after_backward
        self._optimizer = optimizer_of(model.parameters())

    def step(self, batch: Batch) -> torch.Tensor:
        count = min(self._micro_batches, len(batch["input_ids"]))
        cut = {name: rows.tensor_split(count) for name, rows in batch.items()}
        total = torch.zeros(())
        for number in range(count):
            part = {name: rows[number] for name, rows in cut.items()}
            with self._exchanging(number == count - 1):
                loss = self._model(**part, num_items_in_batch=self._labels).loss
                loss.backward()
            total += loss.detach()
        self._after_backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / self._ranks


class Gpumix:
    """The engine by a plan."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        engine = gpumix.prepare(model, plan)
        self._on_engine = OnEngine(engine, optimizer_of(engine.parameters()))
        self._ranks = len(plan.workers)

    def step(self, batch: Batch) -> torch.Tensor:
        return self._on_engine.step(batch) / self._ranks

    def recorded_step(self, batch: Batch) -> RecordedStep:
        """A step that tells what its time went into."""
        return self._on_engine.recorded_step(batch)


def labels_of(setting: Setting) -> int:
    """Labels of a global batch."""
    return setting.labels(setting.global_batch)
