"""An engine that finds, before its first step, by which rule losses of micro-batches add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gpumix.engine import additivity
from gpumix.engine.coroutine import ModelError
from gpumix.engine.reduction import Reduces
from gpumix.engine.rehearsed_models import NO_RULE
from gpumix.engine.samples import samples_in
from gpumix.engine.trials import Trials
from gpumix.spec.cut import cut_rows
from gpumix.spec.shares import rows_of, share_of
from gpumix.spec.stage import Worker

REHEARSALS = 3  # until a batch's samples are told apart


class Settling(Trials):
    """
    Attributes:
        reduction: what a record says of how losses of micro-batches add up; empty as long as that
            is not known.
    """

    reduction: str
    _reduces: Reduces
    _couples: str
    _worker: Worker

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
        rows = self._rows_of(batch, samples, in_step=in_step)
        for _ in range(REHEARSALS):
            told = additivity.rehearse(self, batch, rows, reduces, self._couples)
            self.reduction = told or self.reduction
            if not (reduces.rivals and additivity.is_told_apart(self, batch, reduces)):
                break
        else:
            self._refuse_rivals()
        self._settled = reduces.rule is not None and not reduces.rivals
        self._trims = reduces.trims

    def in_parts(
        self,
        run: Callable[[nn.Module, Any], Any],
        batch: Any,
        samples: int | None = None,
        *,
        in_step: bool = False,
    ) -> list[Any]:
        """What `run` makes of a few samples of a batch, at once and in two parts; see
        `engine.additivity.in_parts`."""
        rows = self._rows_of(batch, samples, in_step=in_step)
        return additivity.in_parts(self, batch, rows, self._reduces, run)

    def _refuse_rivals(self) -> None:
        reduces = self._reduces
        names = [rival.rule.name for rival in reduces.rivals]
        if reduces.rule is None or self._couples == NO_RULE:
            return
        raise ModelError(
            "what the loss of a batch is a mean over cannot be told",
            where=type(self.model).__name__,
            why=f"it may be {' or '.join([reduces.rule.name, *names])}: these differ for samples "
            "of the batch, whose losses show no difference",
            fix="return (summed loss, count) from a loss function of your own",
        )

    def _rows_of(self, batch: Any, samples: int | None, *, in_step: bool) -> tuple[range, ...]:
        """Places of this rank's samples in the batch, micro-batch by micro-batch."""
        return self._rows_of_step(samples) if in_step else self._rows_given(batch, samples)

    def _rows_of_step(self, samples: int | None) -> tuple[range, ...]:
        return self._rows if samples is None else rows_of(self.plan, self.comm.rank, samples)

    def _rows_given(self, batch: Any, samples: int | None) -> tuple[range, ...]:
        """Places of this rank's samples where nothing is trained: of any number of them."""
        if self.places:
            return share_of(self.plan, self.comm.rank).rows(samples)
        return cut_rows(range(samples_in(batch)), self._worker.micro_batch)
