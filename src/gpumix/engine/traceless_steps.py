"""Engine steps that leave no trace: rehearsals of the first step, replays of a batch, and steps
taken back."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gpumix.engine.batch.batch_split import count_samples, repeat_sample
from gpumix.engine.comm.step_exchange import StepTable
from gpumix.engine.loss.reduction import Objective
from gpumix.engine.model.model_settings import find_layer_drop_rates
from gpumix.engine.model.rng import use_eval_mode
from gpumix.engine.schedule.micro_batch import Loss
from gpumix.engine.schedule.pipeline_parallel import PipelineStage
from gpumix.engine.sharded_model import ShardedModel
from gpumix.engine.sharding.gradient_fingerprint import See
from gpumix.engine.sharding.mixed_precision import LossScaler
from gpumix.engine.step_state import StepState
from gpumix.engine.update_guard import UpdateGuard
from gpumix.schema.plan.plan import Plan


class TrialSteps(ShardedModel):
    """Engine base class for steps that are undone.

    Attributes:
        tells_losses: True if this rank reports the losses of its micro-batches to all ranks.
    """

    plan: Plan
    places: Sequence[PipelineStage]
    keepers: list[nn.Module]
    tells_losses: bool
    _state: StepState
    _failed: str

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return self._state.steps

    @steps.setter
    def steps(self, number: int) -> None:
        self._state.steps = number

    @property
    def scaler(self) -> LossScaler:
        """Scale of losses, for fp16."""
        return self._state.scaler

    @property
    def overflowed(self) -> bool:
        """Whether the last step's fp16 gradients overflowed, and were dropped."""
        return self._state.overflowed

    @property
    def losses_counted(self) -> torch.Tensor:
        """Denominator of the last step's loss, float64 on the device."""
        return self._state.losses_counted

    @property
    def computed(self) -> list[tuple[int, int | None]]:
        """Samples, and padded tokens per sample, of each micro-batch of the last step."""
        return self._state.computed

    @property
    def exchanged(self) -> StepTable:
        """Values of all ranks in the last step."""
        return self._state.exchanged

    @property
    def guard(self) -> UpdateGuard | None:
        """Guard that holds back bad updates, if set."""
        return self._state.guard

    @guard.setter
    def guard(self, guard: UpdateGuard | None) -> None:
        self._state.guard = guard

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
        state = self._state
        undo, state.undos = state.undos[-1], state.undos[:-1]
        state.steps -= 1
        state.losses_counted = undo.losses_counted
        if undo.buffers is not None:
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
        rows = self._state.rows
        if self.places:
            times = sum(map(len, self._state.rows))
            batch = repeat_sample(batch, times)
        else:
            rows = (range(count_samples(batch)),) if batch is not None else ()
        with use_eval_mode(self.model), self._restore_after(see) as state:
            state.rows = rows
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
        with self._restore_after(backward=backward) as state:
            state.rows, state.objective, state.trims = rows, objective, trims
            state.losses_counted = torch.ones_like(state.losses_counted)
            state.settled, state.compares_samples = True, False
            if backward:
                steps = state.steps
                self._step(batch)
                while state.overflowed and state.scaler.scale > 1:  # each attempt halves the scale
                    state.steps = steps
                    self._step(batch)
            else:
                with self._in_step():
                    self._forward_only(objective, batch, rows)
            return seen(piece.local for piece in self._trained_pieces())

    @contextlib.contextmanager
    def _restore_after(
        self, see: See | None = None, *, backward: bool = True
    ) -> Iterator[StepState]:
        """Undo all changes of a step inside, including gradients; yield the state of that step.
        Gradients of earlier steps, to be added to, are restored."""
        before = self._state
        pieces = [piece.local for piece in self._trained_pieces()]
        grads = [(p, p.grad) for p in pieces if p.grad is not None]
        kept = [(p, own, own.clone() if backward else None) for p, own in grads]
        for parameter, *_ in kept:
            parameter.grad = None
        self._state = self._state.make_trial()
        self._observe_gradients(see or self._state.own_norm.see)
        try:
            with find_layer_drop_rates(self.model):
                yield self._state
        finally:
            self._state = before
            self._observe_gradients(self._state.own_norm.see)
            for parameter in pieces:
                parameter.grad = None
            for parameter, gradient, values in kept:
                parameter.grad = gradient if values is None else gradient.copy_(values)

    def _observe_gradients(self, see: See) -> None:
        for bucket in self._buckets:
            bucket.see = see
