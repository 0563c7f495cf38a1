"""Steps of an engine that leave no trace: rehearsals of the first one, and replays of a batch."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from gpumix.engine import additivity
from gpumix.engine.layer_drop import stop_layer_drop
from gpumix.engine.micro_batch import Loss
from gpumix.engine.own_gradients import OwnNorm, See
from gpumix.engine.pipelined import Place
from gpumix.engine.precision import LossScaler
from gpumix.engine.randomness import evaluating
from gpumix.engine.reduction import Objective, Reduces
from gpumix.engine.samples import repeated, samples_in
from gpumix.engine.sharded_model import ShardedModel
from gpumix.spec.plan import Plan

_OF_A_STEP = (  # what a step leaves in the engine, beside buffers and gradients
    "_rows", "_own_norm", "scaler", "steps", "losses_counted", "exchanged", "overflowed",
    "computed", "guard", "_to_take_back", "_objective", "_trims", "_settled", "_tells_samples",
)  # fmt: skip


class Trials(ShardedModel):
    """An engine's steps that are undone.

    Attributes:
        reduction: what a record says of how losses of micro-batches add up; empty as long as that
            is not known.
    """

    plan: Plan
    places: Sequence[Place]
    scaler: LossScaler
    steps: int
    overflowed: bool
    losses_counted: torch.Tensor
    guard: Any
    keepers: list[nn.Module]
    reduction: str
    _reduces: Reduces
    _objective: Objective
    _couples: str
    _rows: tuple[range, ...]
    _own_norm: OwnNorm
    _trims: bool
    _settled: bool
    _tells_samples: bool

    @abstractmethod
    def _step(self, batch: Any) -> torch.Tensor: ...

    @abstractmethod
    def _rows_of_step(self, samples: int | None) -> tuple[range, ...]: ...

    @abstractmethod
    def _rows_given(self, batch: Any, samples: int | None) -> tuple[range, ...]: ...

    @abstractmethod
    def _forward_only(self, objective: Any, batch: Any, rows: Sequence[range]) -> list[Loss]: ...

    @abstractmethod
    def _in_step(self) -> contextlib.AbstractContextManager[None]: ...

    def is_settled(self, *, in_step: bool) -> bool:
        """Whether `settle` has nothing to do."""
        is_known = self._reduces.rule is not None and not self._reduces.rivals
        return self._settled or is_known or (in_step and self.plan.is_uncut)

    def settle(self, batch: Any, samples: int | None = None, *, in_step: bool = False) -> None:
        """Rehearse with the first batch by which rule losses of micro-batches add up, if that is
        not known yet; see `engine.additivity`. Collective; `step` and `evaluate` do so.

        Raises:
            ModelError: by none, and the plan cuts the batch.
        """
        if self.is_settled(in_step=in_step):
            return
        reduces = self._reduces
        if reduces.rivals and not additivity.is_told_apart(self, batch, reduces):
            return
        rows = self._rows_of_step(samples) if in_step else self._rows_given(batch, samples)
        told = additivity.rehearse(self, batch, rows, reduces, self._couples)
        self.reduction = told or self.reduction
        self._settled = reduces.rule is not None and not reduces.rivals
        self._trims = reduces.trims

    def replay(self, batch: Any, see: See) -> int:
        """Forward and backward of a batch, as in a step but without dropout, after which all is as
        it was before. Collective, between two steps; there are no gradients.

        Args:
            batch: one micro-batch, which may be another one on each rank; None for none. In several
                stages, and of a team, it is one sample, the same on all of them: stages compute it
                in place of each of theirs.
            see: is told what this rank has of the gradients.

        Returns:
            How many times this rank has computed it.
        """
        times = 1
        rows = self._rows
        if self.places:
            times = sum(map(len, self._rows))
            batch = repeated(batch, times)
        else:
            rows = (range(samples_in(batch)),) if batch is not None else ()
        with evaluating(self.model), self._as_before(see):
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
        """What `seen` makes of this rank's parameters and their gradients after a step of a batch
        of its own, by another objective, after which all is as it was before. Collective.

        Args:
            rows: of each of this rank's micro-batches.
            trims: whether columns of padding are cut off.
            backward: or there are no gradients.
        """
        with self._as_before(self._own_norm.see):
            self._rows, self._objective, self._trims = rows, objective, trims
            self.losses_counted = torch.ones_like(self.losses_counted)
            self._settled, self._tells_samples = True, False
            if backward:
                steps = self.steps
                self._step(batch)
                while self.overflowed and self.scaler.scale > 1:  # which each time halves
                    self.steps = steps
                    self._step(batch)
            else:
                with self._in_step():
                    self._forward_only(objective, batch, rows)
            return seen(self.parameters())

    @contextlib.contextmanager
    def _as_before(self, see: See) -> Iterator[None]:
        """What a step inside changes, gradients and all, is undone."""
        before = {name: getattr(self, name) for name in _OF_A_STEP}
        self._own_norm, self.scaler, self.guard = OwnNorm(self.device), copy(self.scaler), None
        self._see_by(see)
        drop_again = stop_layer_drop(self.model)
        try:
            yield
        finally:
            drop_again()
            vars(self).update(before)
            self._see_by(self._own_norm.see)
            for parameter in self.parameters():
                parameter.grad = None

    def _see_by(self, see: See) -> None:
        for bucket in self._buckets:
            bucket.see = see
