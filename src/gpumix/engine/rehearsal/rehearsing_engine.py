"""Engine that finds the rule by which losses of micro-batches add up, before its first step, and
checks later steps against the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.engine.batch.batch_split import copy_batch, count_samples, select_samples
from gpumix.engine.loss.reduction import ObjectiveWithRule
from gpumix.engine.model.adapters import enable_adapters
from gpumix.engine.model.backward_hooks import compare_reruns
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.model.rng import OtherGenerators
from gpumix.engine.rehearsal import additivity
from gpumix.engine.rehearsal.loss_watch import MOST_DOUBTS, REHEARSAL_STEPS, LossWatch
from gpumix.engine.rehearsal.refusals import (
    make_changed_kind_error,
    make_clamped_count_error,
    make_empty_mean_error,
    make_unequal_weights_error,
)
from gpumix.engine.rehearsal.samples import all_gather_values, is_true_on_any_rank
from gpumix.engine.rehearsal.settled_reduction import SettledReduction
from gpumix.engine.trial_steps import TrialSteps
from gpumix.hardware.runtime import is_gpu
from gpumix.schema.job.coupled_losses import NO_RULE
from gpumix.schema.plan.batch_shares import get_batch_share, get_micro_batch_rows
from gpumix.schema.plan.splitting import split_rows
from gpumix.schema.plan.stage import Worker

# Numbers of steps done before the steps that are checked closely.
COMPARED_STEPS = (0, *REHEARSAL_STEPS)
MAX_REHEARSALS = 3  # of a batch, until no other rule fits


class RehearsingEngine(TrialSteps):
    """Engine base class that settles how losses of micro-batches add up.

    Attributes:
        reduction: description of the rule for records; empty while unknown.
    """

    reduction: str
    notice: float
    report: float
    _reduces: ObjectiveWithRule
    _couples: str
    _worker: Worker
    _leaves_out: bool
    _others: OtherGenerators
    _rehearsed_at = 0
    _evaluations_left = MOST_DOUBTS  # with losses divided by 1, to check
    _in_training_alone = False  # only training losses were rehearsed; evaluation computes others
    _no_samples: Any = None  # a batch without samples, once losses are watched

    @property
    def accepts_coupling(self) -> bool:
        """True if each micro-batch may have a loss of its own."""
        return self._couples == NO_RULE

    def is_settled(self, *, in_step: bool) -> bool:
        """Return True if `settle` has nothing to do. Collective."""
        is_known = self._reduces.rule is not None and not self._reduces.alternatives
        if in_step and self.plan.is_uncut:
            return True
        is_due = self._is_due() if in_step else self._in_training_alone
        return (self._state.settled or is_known) and not is_due

    def settle(self, batch: Any, samples: int | None = None, *, in_step: bool = False) -> None:
        """Find the rule by which losses of micro-batches add up, if unknown, by a rehearsal with
        the first batch; see `engine.rehearsal.additivity`. Collective; `step` and `evaluate` do so.

        Raises:
            ModelError: no rule holds, and the plan cuts the batch.
        """
        if in_step and self._no_samples is None and self._state.watch is not None:
            self._no_samples = copy_batch(select_samples(batch, slice(0)))
        if self.is_settled(in_step=in_step):
            return
        if in_step and self._is_due():
            self._settle_again(batch, samples)
        if not self._state.settled:
            self._find_rule(batch, samples, in_step=in_step)
        if self._in_training_alone and not in_step:
            rows = self._rows_of(batch, samples, in_step=False)
            additivity.rehearse_evaluation(self, batch, rows, self._reduces)
            self._in_training_alone = False

    def _find_rule(self, batch: Any, samples: int | None, *, in_step: bool) -> None:
        """Find the rule that the losses of a batch follow, if the batch tells rules apart."""
        reduces = self._reduces
        if reduces.alternatives and not additivity.can_rule_out_alternatives(self, batch, reduces):
            return
        rows = self._rows_of(batch, samples, in_step=in_step)
        trains = in_step or not self.plan.is_uncut
        for _ in range(MAX_REHEARSALS):
            with enable_adapters(self.model) if self.trained_names() else nullcontext():
                found = additivity.rehearse(
                    self, batch, rows, reduces, self._couples, trains=trains
                )
            self.reduction = found.told or self.reduction
            if not (
                reduces.alternatives and additivity.can_rule_out_alternatives(self, batch, reduces)
            ):
                break
        else:
            self._refuse_rivals()
        self._state.settled = reduces.rule is not None and not reduces.alternatives
        self._state.trims = reduces.trims
        self._in_training_alone = found.training and not self.accepts_coupling
        if found.adds_up and self._state.watch is None and not self.accepts_coupling:
            self._watch_losses(found.known)
            self._no_samples = copy_batch(select_samples(batch, slice(0)))

    @property
    def settled_reduction(self) -> SettledReduction | None:
        """How losses add up, if a rehearsal found it."""
        rule, watch = self._reduces.rule, self._state.watch
        if not self._state.settled or rule is None or watch is None:
            return None
        return SettledReduction(
            rule, self._reduces.trims, watch.known, self._in_training_alone, self.reduction
        )

    def assume(self, losses: SettledReduction) -> None:
        """Take over how losses add up from an engine of the same model, plan and batches, in place
        of the first rehearsal. Later rehearsals and the watch on losses stay. Collective, before
        the first step."""
        self._reduces.rule, self._reduces.trims = losses.rule, losses.trims
        self._state.settled, self._state.trims = True, losses.trims
        self._in_training_alone, self.reduction = losses.training_alone, losses.told
        self._watch_losses(losses.kinds)

    def rehearse(
        self, objective: ObjectiveWithRule, batch: Any, samples: int | None = None
    ) -> None:
        """Check that another objective's losses of a batch add up, now and again the next time.
        Collective.

        Args:
            batch, samples: as in `step`.

        Raises:
            ModelError: the losses do not add up.
        """
        rows = self._rows_of_step(samples)
        if objective.rule is None:
            additivity.rehearse(self, batch, rows, objective, self._couples)
        elif not self.plan.is_uncut:
            additivity.rehearse_again(self, batch, rows, objective)

    # -- later steps -------------------------------------------------------------------------------

    def _watch_losses(self, kinds: Sequence[int]) -> None:
        """Watch losses from now on; losses of `kinds` are known to add up. Collective."""
        rule = self._reduces.rule
        # On a CPU, the values exchanged in a step are available at once.
        late = is_true_on_any_rank(self, is_gpu(self.device))
        by_values = rule is not None and rule.kind == "graph"
        self._state.watch = LossWatch(self.device, kinds, late=int(late), by_values=by_values)
        self._rehearsed_at = self._state.steps

    def _seen(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the objective's (summed loss, count) of a micro-batch of a step, and watch it."""
        summed, count = self._state.objective(model, batch)
        watch = self._state.watch if self._reduces.is_watched else None
        if watch is not None and torch.is_grad_enabled():
            watch.see(summed, count, batch)
        return summed, count

    @contextmanager
    def _compared(self) -> Iterator[None]:
        """Run forward and backward of a step inside. In the first step, and some later steps,
        recomputed outputs of units are compared with the original outputs, and other generators of
        random numbers than torch's are observed.

        Raises:
            ModelError: a unit computes something else.
        """
        with self._allow_random_draws():
            if self._state.steps not in COMPARED_STEPS:
                yield
                return
            with compare_reruns() as comparison:
                yield
        if error := comparison.error():
            raise error

    def _allow_random_draws(self) -> AbstractContextManager[None]:
        """Let the model draw random numbers by any generator inside."""
        return self._others.of_step(looks=self._state.steps in COMPARED_STEPS)

    def _is_due(self) -> bool:
        """Return True if a rehearsal is due, by schedule or by reports of earlier steps."""
        if self._state.watch is None or not self._reduces.is_watched:
            return False
        self._state.watch.read()
        again = next((step for step in REHEARSAL_STEPS if step > self._rehearsed_at), math.inf)
        return bool(self._state.watch.doubts) or self._state.steps >= again

    def look_back(self) -> None:
        """Check that losses of the last steps add up as before, as the next step would check.
        Collective; with several stages, only checks without a rehearsal.

        Raises:
            ModelError: the losses do not add up.
        """
        if self._state.watch is not None and not self._failed:
            self._state.watch.read(all_of_them=True)
            while self._state.watch.doubts:
                self._settle_again(None)

    def _settle_again(self, batch: Any | None, samples: int | None = None) -> None:
        """Check that losses still add up. Collective.

        Args:
            batch: None if there is none.

        Raises:
            ModelError: the losses do not add up.
        """
        watch = self._state.watch
        assert watch is not None, "something is due"
        doubt = watch.doubts.popleft() if watch.doubts else None
        step = self._state.steps if doubt is None else doubt.step
        kinds: Sequence[int] = ()
        settled = doubt.kinds[0] if doubt is not None and doubt.kinds else 0
        try:
            if doubt is None:
                rows = self._rows_of_step(samples)
                kinds = additivity.rehearse_again(self, batch, rows, self._reduces).known
            elif settled:
                kinds = self._rehearse_kind(settled, batch, samples)
            if doubt is not None and doubt.unlike is not None:
                raise make_unequal_weights_error(self._reduces, *doubt.unlike)
            if doubt is not None and doubt.miscounts and not self.places:
                if watch.by_values:
                    self._count_again(doubt.miscounted)
                else:
                    self._rehearse_each(doubt.miscounted, batch, samples)
                    watch.accept_rows()
        except ModelError as error:
            error.where = f"{type(self.model).__name__}, step {step}"
            raise
        self._rehearsed_at = self._state.steps
        watch.accept_kinds(kinds, settled)

    def _rehearse_kind(self, kind: int, batch: Any, samples: int | None) -> Sequence[int]:
        """Rehearse with a micro-batch whose kind of loss is new to rehearsals. With several stages,
        not all of whose ranks keep it, rehearse a batch, if given. Collective."""
        assert self._state.watch is not None, "it has seen it"
        rows = self._rows_of_step(samples)
        if not self.places:
            batch, rows = self._kept(self._state.watch.kept(kind))
        elif batch is None:
            return [kind]
        found = additivity.rehearse_again(self, batch, rows, self._reduces)
        # No rehearsal leaves out blocks, so none sees a head without any block before it.
        if kind not in found.seen and not (self.places or self._leaves_out):
            raise make_changed_kind_error()
        return [*found.known, kind] if found.is_nonzero else ()

    def _rehearse_each(self, own: Sequence[Any], batch: Any, samples: int | None) -> None:
        """Rehearse with micro-batches whose loss may count otherwise than the rule, or with the
        next batch if all of them have a single sample. Collective.

        Args:
            own: of this rank.

        Raises:
            ModelError: the losses do not add up.
        """
        several = [one for one in own if count_samples(one) > 1]
        numbers = [int(number) for (number,) in all_gather_values(self, [float(len(several))])]
        for rank, number in enumerate(numbers):
            for place in range(number):
                kept, rows = self._kept(several[place] if rank == self.comm.rank else None)
                self._rehearse_miscounted(kept, rows)
        if not any(numbers) and batch is not None:
            self._rehearse_miscounted(batch, self._rows_of_step(samples))

    def _rehearse_miscounted(self, batch: Any, rows: tuple[range, ...]) -> None:
        if not additivity.rehearse_again(self, batch, rows, self._reduces).is_finite:
            raise make_empty_mean_error(self._reduces)

    def _check_evaluated(self) -> None:
        """Check that evaluated micro-batches with losses divided by 1 have something to count.
        Collective.

        Raises:
            ModelError: a micro-batch has nothing to count.
        """
        own = self._reduces.take_evaluated_ones()
        watch = self._state.watch
        if watch is None or not watch.by_values or self.places or not self._evaluations_left:
            return
        if self._count_again(own):
            self._reduces.take_evaluated_ones()
            self._evaluations_left -= 1

    def _count_again(self, own: Sequence[Any]) -> int:
        """Check that micro-batches with losses divided by 1 have something to count; return their
        number on all ranks. Collective.

        Raises:
            ModelError: a micro-batch has nothing to count.
        """
        numbers = [int(number) for (number,) in all_gather_values(self, [float(len(own))])]
        for rank, number in enumerate(numbers):
            for place in range(number):
                batch, rows = self._kept(own[place] if rank == self.comm.rank else None)
                if not additivity.is_denominator_doubled(self, batch, rows, self._reduces):
                    raise make_clamped_count_error(self._reduces)
        return sum(numbers)

    def _kept(self, batch: Any) -> tuple[Any, tuple[range, ...]]:
        """Return a kept micro-batch and its rows; an empty micro-batch for None."""
        return (self._no_samples, ()) if batch is None else (batch, (range(count_samples(batch)),))

    def in_parts(
        self,
        run: Callable[[nn.Module, Any], Any],
        batch: Any,
        samples: int | None = None,
        *,
        in_step: bool = False,
        start: int = 0,
        chosen: ObjectiveWithRule | None = None,
        turn: int | None = None,
    ) -> list[Any]:
        """Return the results of `run` for a few samples of a batch, at once and in two parts; see
        `engine.rehearsal.additivity.run_in_parts`.

        Args:
            chosen: by whose rules the samples are unlike; by default the loss's.
        """
        rows = self._rows_of(batch, samples, in_step=in_step)
        chosen = chosen or self._reduces
        return additivity.run_in_parts(self, batch, rows, chosen, run, start=start, turn=turn)

    def _refuse_rivals(self) -> None:
        reduces = self._reduces
        names = [alternative.rule.name for alternative in reduces.alternatives]
        if reduces.rule is None or self.accepts_coupling:
            return
        raise ModelError(
            "what the loss of a batch is a mean over cannot be told",
            code="loss-mean-unknown",
            where=type(self.model).__name__,
            why=f"it may be {' or '.join([reduces.rule.name, *names])}: these differ for samples "
            "of the batch, whose losses show no difference",
            fix=reduces.how_to_count,
        )

    def _rows_of(self, batch: Any, samples: int | None, *, in_step: bool) -> tuple[range, ...]:
        """Return the places of this rank's samples in the batch, by micro-batch."""
        return self._rows_of_step(samples) if in_step else self._rows_given(batch, samples)

    def _rows_of_step(self, samples: int | None) -> tuple[range, ...]:
        return (
            self._state.rows
            if samples is None
            else get_micro_batch_rows(self.plan, self.comm.rank, samples)
        )

    def _rows_given(self, batch: Any, samples: int | None) -> tuple[range, ...]:
        """Return the places of this rank's samples outside of training, of any number."""
        if self.places:
            return get_batch_share(self.plan, self.comm.rank).rows(samples)
        return split_rows(range(count_samples(batch)), self._worker.micro_batch)
