"""Engine steps that leave no trace: rehearsals of the first step, replays of a batch, and steps
taken back."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from gpumix.engine.batch.batch_split import count_samples, repeat_sample
from gpumix.engine.loss.reduction import Objective
from gpumix.engine.model.model_settings import find_layer_drop_rates
from gpumix.engine.model.rng import use_eval_mode
from gpumix.engine.rehearsal.loss_watch import LossWatch
from gpumix.engine.schedule.micro_batch import Loss
from gpumix.engine.schedule.pipeline_parallel import PipelineStage
from gpumix.engine.sharded_model import ShardedModel
from gpumix.engine.sharding.gradient_fingerprint import SampledGradientNorm, See
from gpumix.engine.sharding.mixed_precision import LossScaler
from gpumix.engine.undo import StepUndo
from gpumix.schema.plan.plan import Plan

_STEP_ATTRIBUTES = (  # left by a step in the engine, in addition to buffers and gradients
    "_rows", "_own_norm", "scaler", "steps", "losses_counted", "exchanged", "overflowed",
    "computed", "guard", "_to_take_back", "_objective", "_trims", "_settled", "_tells_samples",
    "_watch", "gradient_scaling",
)  # fmt: skip


class TrialSteps(ShardedModel):
    """Engine base class for steps that are undone.

    Attributes:
        tells_losses: True if this rank reports the losses of its micro-batches to all ranks.
    """

    plan: Plan
    places: Sequence[PipelineStage]
    scaler: LossScaler
    steps: int
    overflowed: bool
    losses_counted: torch.Tensor
    guard: Any
    keepers: list[nn.Module]
    tells_losses: bool
    _objective: Objective
    _rows: tuple[range, ...]
    _own_norm: SampledGradientNorm
    _trims: bool
    _settled: bool
    _tells_samples: bool
    _to_take_back: tuple[StepUndo, ...]
    _watch: LossWatch | None = None
    _failed: str

    @abstractmethod
    def _step(self, batch: Any) -> torch.Tensor: ...

    @abstractmethod
    def _forward_only(self, objective: Any, batch: Any, rows: Sequence[range]) -> list[Loss]: ...

    @abstractmethod
    def _in_step(self) -> contextlib.AbstractContextManager[None]: ...

    def take_back_step(self) -> None:
        """Undo the last step, except for gradients: restore the buffers and the count of steps. For
        a step whose gradients are not used; the next step draws the same dropout again. The step
        before may be taken back next, and no more."""
        undo, self._to_take_back = self._to_take_back[-1], self._to_take_back[:-1]
        self.steps -= 1
        self.losses_counted = undo.losses_counted
        undo.buffers.restore()

    def replay(self, batch: Any, see: See) -> int:
        """Run forward and backward of a batch as in a step, but without dropout, and restore all
        state. Collective, between two steps, without gradients.

        Args:
            batch: one micro-batch, possibly different on each rank; None for none. With several
                stages, or in a tensor-parallel group, one sample, equal on all ranks: stages
                compute it in place of each of their samples.
            see: receives this rank's part of the gradients.

        Returns:
            Number of times this rank has computed the batch.
        """
        times = 1
        rows = self._rows
        if self.places:
            times = sum(map(len, self._rows))
            batch = repeat_sample(batch, times)
        else:
            rows = (range(count_samples(batch)),) if batch is not None else ()
        with use_eval_mode(self.model), self._restore_after(see):
            self._rows = rows
            self._step(batch)
        return times

    def tried(
        self,
        batch: Any,
        rows: tuple[range, ...],
        objective: Objective,
        *,
        trims: bool,
        backward: bool,
        seen: Callable[[Iterator[nn.Parameter]], Any],
    ) -> Any:
        """Run a step of a separate batch with another objective, and restore all state. Return the
        result of `seen` for this rank's parameters with gradients. Collective.

        Args:
            rows: rows of each of this rank's micro-batches.
            trims: True to cut off padding columns.
            backward: False: no gradients.
        """
        with self._restore_after(self._own_norm.see):
            self._rows, self._objective, self._trims = rows, objective, trims
            self.losses_counted = torch.ones_like(self.losses_counted)
            self._settled, self._tells_samples = True, False
            if backward:
                steps = self.steps
                self._step(batch)
                while self.overflowed and self.scaler.scale > 1:  # each attempt halves the scale
                    self.steps = steps
                    self._step(batch)
            else:
                with self._in_step():
                    self._forward_only(objective, batch, rows)
            return seen(self.parameters())

    @contextlib.contextmanager
    def _restore_after(self, see: See) -> Iterator[None]:
        """Undo all changes of a step inside, including gradients. Gradients of earlier steps, to be
        added to, are restored."""
        before = {name: getattr(self, name) for name in _STEP_ATTRIBUTES}
        kept = [(p, p.grad, p.grad.clone()) for p in self.parameters() if p.grad is not None]
        for parameter, *_ in kept:
            parameter.grad = None
        self._own_norm, self.scaler = SampledGradientNorm(self.device), copy(self.scaler)
        self.guard = self._watch = self.gradient_scaling = None
        self._observe_gradients(see)
        try:
            with find_layer_drop_rates(self.model):
                yield
        finally:
            vars(self).update(before)
            self._observe_gradients(self._own_norm.see)
            for parameter in self.parameters():
                parameter.grad = None
            for parameter, gradient, values in kept:
                parameter.grad = gradient.copy_(values)

    def _observe_gradients(self, see: See) -> None:
        for bucket in self._buckets:
            bucket.see = see
