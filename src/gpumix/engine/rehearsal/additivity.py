"""Rehearsal of the first step: check that losses of parts of a batch add up to the batch's loss.

A few samples are computed at once, and again in two unequal parts. By the right rule, the loss of
all samples is the sum of the parts' losses, each times its denominator, over the denominator of all
samples. The same holds for gradients. If no rule fits, the loss couples samples, and cutting the
batch into micro-batches would train something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gpumix.engine.batch.batch_split import (
    IGNORED_LABEL,
    LABELS,
    MASK,
    count_samples,
    fill_padding_with_tokens,
    find_padding_starts,
    select_samples,
)
from gpumix.engine.loss.reduction import (
    GRAPH,
    AlternativeRule,
    ObjectiveWithRule,
    ReducedLoss,
    ReductionRule,
)
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.rehearsal.computations import TrialRunner
from gpumix.engine.rehearsal.module_attributes import preserve_attributes
from gpumix.engine.rehearsal.observations import (
    SMALLEST,
    TOLERANCE,
    TrialLoss,
    counts_of,
    gradient_error,
    has_unequal_denominators,
    is_close_to_any,
    is_in_proportion,
    is_trial_close,
    tolerance_of,
    weights_of,
    worst_error,
)
from gpumix.engine.rehearsal.refusals import (
    NOT_OF_PARTS,
    find_changed_buffers,
    make_leaked_state_error,
    make_random_eval_error,
    make_repeat_error,
    refuse_any,
)
from gpumix.engine.rehearsal.samples import (
    MORE_SAMPLES,
    SAMPLES,
    RehearsalMicroBatch,
    all_gather_values,
    choose_micro_batch,
    is_true_on_any_rank,
    select_own_samples,
)
from gpumix.engine.trial_steps import TrialSteps
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.schema.errors import GpumixError
from gpumix.schema.job.coupled_losses import HOW_TO_COUPLE, NO_RULE

# An error up to `DOUBTFUL` is taken for rounding. A larger error is compared with the error of one
# sample, alone and twice, and may be up to `ROUNDINGS` times as large.
DOUBTFUL, ROUNDINGS = 0.05, 10.0
SAME = 1e-6  # relative, for losses computed with equal random numbers


class RehearsalResult(NamedTuple):
    """Result of a rehearsal.

    Attributes:
        told: how losses add up, as written to records.
        seen: kinds of the computed losses (`loss_graph.kind_of`).
        shows: whether the losses were nonzero; zero adds up by any rule.
        adds_up: whether the losses add up by a rule.
        training: whether samples were computed in training mode, because evaluation mode differs.
        is_finite: whether the losses were numbers.
    """

    told: str
    seen: Sequence[int] = ()
    is_nonzero: bool = False
    adds_up: bool = False
    training: bool = False
    is_finite: bool = True

    @property
    def known(self) -> Sequence[int]:
        """Kinds of losses known to add up."""
        return self.seen if self.is_nonzero and self.adds_up else ()


NO_REHEARSAL = RehearsalResult("")


def rehearse(
    engine: TrialSteps,
    batch: Any,
    rows: Sequence[range],
    objective: ObjectiveWithRule,
    couples: str,
    *,
    trains: bool = True,
) -> RehearsalResult:
    """Find the rule that a loss follows and whether padding may be cut off. Collective, before the
    first step or evaluation.

    Args:
        batch, rows: this rank's samples, and the places of each micro-batch's samples.
        couples: with `NO_RULE`, a loss without a rule is no error.
        trains: whether losses must add up in training too, where batches may not be cut.

    Raises:
        ModelError: losses of parts do not add up by any rule.
    """
    found = _rehearsal(engine, batch, rows, objective)
    if found is None:
        return NO_REHEARSAL
    with preserve_attributes(engine.model):
        return found.run(couples, trains=trains)


def rehearse_again(
    engine: TrialSteps, batch: Any, rows: Sequence[range], objective: ObjectiveWithRule
) -> RehearsalResult:
    """Check that losses still add up by the known rule. Collective.

    Args:
        batch, rows: as in `rehearse`, with samples on at least one rank.

    Raises:
        ModelError: losses do not add up by the known rule.
    """
    place = choose_micro_batch(engine, batch, rows, objective, uncut=True)
    assert place is not None, "some rank has samples"
    own = select_own_samples(
        engine, batch, rows, place, objective, most=max(MORE_SAMPLES, place.size)
    )
    with preserve_attributes(engine.model):
        return _Rehearsal(engine, batch, own, place, objective, place.size).run_again()


def rehearse_evaluation(
    engine: TrialSteps, batch: Any, rows: Sequence[range], objective: ObjectiveWithRule
) -> None:
    """Check that evaluation losses add up by the rule found in training. Collective. A model that
    draws random numbers in evaluation is not checked.

    Raises:
        ModelError: losses do not add up by the rule.
    """
    found = _rehearsal(engine, batch, rows, objective)
    if found is not None:
        with preserve_attributes(engine.model):
            found.run_evaluation()


def is_denominator_doubled(
    engine: TrialSteps, batch: Any, rows: Sequence[range], objective: ObjectiveWithRule
) -> bool:
    """Return whether doubling the samples doubles the denominator of a loss. Collective.

    Args:
        batch, rows: a micro-batch, on at least one rank.
    """
    place = choose_micro_batch(engine, batch, rows, objective, uncut=True)
    assert place is not None, "some rank has samples"
    own = None if place.number is None else batch
    with preserve_attributes(engine.model):
        return _Rehearsal(engine, batch, own, place, objective).is_denominator_doubled()


def run_in_parts(
    engine: TrialSteps,
    batch: Any,
    rows: Sequence[range],
    objective: ObjectiveWithRule,
    run: Callable[[nn.Module, Any], Any],
    *,
    start: int = 0,
    turn: int | None = None,
) -> list[Any]:
    """Return the results of `run` on a few samples: all, the first, the rest. The list is empty on
    ranks without samples and where the batch is not cut. Runs without gradients and dropout.
    Collective.

    Args:
        run: called with the model and samples; calls the model's forward once.
        batch, rows: as in `rehearse`.
        start: place of the first sample in the batch, which determines the random numbers drawn.
        turn: compute one micro-batch of each rank instead, another one each turn; with several
            stages, one micro-batch.
    """
    if turn is None or engine.places:
        found = _rehearsal(engine, batch, rows, objective, whole=turn is not None)
    else:
        found = _rehearsal_of_each(engine, batch, rows, objective, turn)
    with preserve_attributes(engine.model):
        return [] if found is None else found.made(run, start)


def _rehearsal(
    engine: TrialSteps,
    batch: Any,
    rows: Sequence[range],
    objective: ObjectiveWithRule,
    *,
    whole: bool = False,
) -> _Rehearsal | None:
    """Make a rehearsal of a few samples, or of a whole micro-batch; None where the batch is not
    cut. Collective."""
    place = choose_micro_batch(engine, batch, rows, objective)
    if place is None:
        return None
    most = max(MORE_SAMPLES, place.size) if whole else MORE_SAMPLES
    own = select_own_samples(engine, batch, rows, place, objective, most=most)
    return _Rehearsal(engine, batch, own, place, objective, place.size if whole else SAMPLES)


def _rehearsal_of_each(
    engine: TrialSteps,
    batch: Any,
    rows: Sequence[range],
    objective: ObjectiveWithRule,
    turn: int,
) -> _Rehearsal:
    """Make a rehearsal of a micro-batch of each rank that has several samples."""
    sizes = [len(of) for of in rows if of]
    samples = sum(sizes)
    if samples < 2:
        return _Rehearsal(engine, batch, None, RehearsalMicroBatch(None, 2), objective)
    number = turn % len(sizes)
    size = sizes[number] if sizes[number] > 1 else min(SAMPLES, samples)
    begin = turn % size  # another first sample each turn
    places = [(sum(sizes[:number]) + place) % samples for place in range(size)]
    own = select_samples(batch, [*places[begin:], *places[:begin]])
    return _Rehearsal(engine, batch, own, RehearsalMicroBatch(0, size), objective, size)


def can_rule_out_alternatives(engine: TrialSteps, batch: Any, objective: ObjectiveWithRule) -> bool:
    """Return whether samples of any rank distinguish the rule from its alternatives. Collective."""
    own = isinstance(objective, ReducedLoss) and objective.can_distinguish_rivals(batch)
    return is_true_on_any_rank(engine, own)


def padding_counts(
    engine: TrialSteps, objective: ObjectiveWithRule, narrow: Any, wide: Any
) -> bool:
    """Return whether padding changes a sample's loss or gradient. Collective.

    Args:
        narrow, wide: batches of one sample on the host, equal on all ranks, that differ only in
            padding.
    """
    plan, rank = engine.plan, engine.comm.rank
    if engine.places:
        number = next((n for n, known in enumerate(engine.places[0].batches) if not known), None)
    else:
        first = next(r for r, worker in enumerate(plan.workers) if worker.samples)
        number = 0 if first in plan.get_tp_group(rank, 0) else None
    place = RehearsalMicroBatch(number, 1)
    with preserve_attributes(engine.model):
        trials = [
            _Rehearsal(engine, one, None if number is None else one, place, objective).alone()
            for one in (narrow, wide)
        ]
    return not is_trial_close(engine, *trials, same_samples=True)


class _Rehearsal(TrialRunner):
    def run(self, couples: str, *, trains: bool) -> RehearsalResult:
        objective = self._objective
        trials, errors, training = self._compared(couples, trains=trains)
        if not errors:
            return RehearsalResult(f"unknown: the first loss is {trials[0].loss}")
        rule = self._rule(trials, errors)
        adds_up = self._adds_up(trials, errors[rule], rule, training=training)
        adds_up = adds_up and self._repeats(trials[0], self._rules[rule], training=training)
        if not adds_up and couples != NO_RULE:
            raise self._couples(trials, training=training)
        if couples != NO_RULE and not self._are_apart(trials[1:], training=training):
            draws = self._draws(trials[0], training=training)
            raise (make_random_eval_error if draws else make_leaked_state_error)(self._engine.model)
        objective.rule = self._found(rule, trials)
        objective.alternatives = self._alternatives(trials, errors, rule)
        if not adds_up:
            told = f"each micro-batch has a loss of its own, taken for {objective.rule.name}"
            return RehearsalResult(told)
        objective.trims = objective.may_trim and self._may_trim()
        return self._found_to_add_up(objective.rule, trials, training=training)

    def run_again(self) -> RehearsalResult:
        """See `rehearse_again`."""
        known = self._objective.rule
        assert known is not None, "it was rehearsed"
        trials, errors, training = self._compared("", trains=True)
        names = [rule.name for rule in self._rules]
        if errors and known.name in names:
            rule = names.index(known.name)
            if not self._adds_up(trials, errors[rule], rule, training=training):
                raise self._changed(trials, errors, known, training=training)
        return self._found_to_add_up(known, trials, training=training)

    def _found_to_add_up(
        self, rule: ReductionRule, trials: Sequence[TrialLoss], *, training: bool
    ) -> RehearsalResult:
        loss = trials[0].loss
        return RehearsalResult(
            rule.name,
            self._kinds_seen(),
            is_nonzero=loss != 0,
            adds_up=True,
            training=training,
            is_finite=math.isfinite(loss),
        )

    def run_evaluation(self) -> None:
        """See `rehearse_evaluation`."""
        known = self._objective.rule
        names = [rule.name for rule in self._rules]
        trials = [self._trial(rows, backward=False) for rows in self._slices()]
        if known is None or known.name not in names or not math.isfinite(trials[0].loss):
            return
        if self._errors(trials)[names.index(known.name)] > 1:
            error = self._couples(trials, training=False)
            if error.code == "loss-not-additive":
                error.what = f"in evaluation, {error.what}"
                error.code = "loss-not-additive-in-evaluation"
                raise error

    def _trained(self, couples: str) -> TrialLoss:
        """Compute all samples in training mode."""
        trained = self._trial(self._slices()[0], training=True)
        if couples != NO_RULE:
            refuse_any(self._engine, find_changed_buffers(self._engine.model, trained.changed))
        self._training = trained.changed  # such as batch norm, which couples samples in training
        # A model or a loss may count what it has seen in training.
        self._trial(self._slices()[2], training=True, backward=False)
        self._refuse_memory(trained)
        return trained

    def _refuse_memory(self, trained: TrialLoss) -> None:
        """Raise if a second training forward of all samples gives another loss. Collective."""
        again = self._trial(self._slices()[0], training=True, backward=False)
        if not (math.isfinite(trained.loss) or math.isfinite(again.loss)):
            return  # no number to compare, as in a first fp16 step that overflows
        if not is_trial_close(self._engine, trained, again):
            raise make_repeat_error(self._engine.model)

    def _compared(self, couples: str, *, trains: bool) -> tuple[list[TrialLoss], list[float], bool]:
        """Compute all samples and the parts, and compare. Takes more samples if the loss of a few
        is 0.

        Returns:
            trials of all samples and the parts; errors by rule, empty if the loss is not finite;
                whether training mode was used.
        """
        found = self._compared_to(self._trained(couples) if trains else None)
        if found[0][0].loss == 0 and self._take_more_samples():
            found = self._compared_to(self._trained(couples) if trains else None)
        return found

    def _compared_to(self, trained: TrialLoss | None) -> tuple[list[TrialLoss], list[float], bool]:
        whole, *parts = self._slices()
        trials = [self._trial(rows) for rows in (whole, *parts)]
        training = False
        if not math.isfinite(trials[0].loss):
            return trials, [], training
        if trained is not None and not is_trial_close(self._engine, trained, trials[0]):
            training = not self._draws(trained, training=True)
            self._refuse_memory(trained)
            if training:  # not random numbers, but another computation in training
                trials = [trained, *(self._trial(rows, training=True) for rows in parts)]
        return trials, self._errors(trials), training

    def _adds_up(
        self, trials: Sequence[TrialLoss], error: float, rule: int, *, training: bool
    ) -> bool:
        return (
            error <= 1
            and not has_unequal_denominators(trials)
            and not self._exceeds_rounding(error, rule, trials[1], training=training)
        )

    # -- comparison --------------------------------------------------------------------------------

    def _errors(self, trials: Sequence[TrialLoss]) -> list[float]:
        """Return the error of the parts by rule, in units of the rounding tolerance. Collective."""
        whole, *parts = trials
        of_loss, of_gradient = tolerance_of(self._engine)
        weights = [weights_of(whole, parts, n) for n in range(len(self._rules))]
        told = [number for own in weights for number in gradient_error(whole, parts, own)]
        sums = (
            torch.tensor(all_gather_values(self._engine, told), dtype=torch.float64).sum(0).tolist()
        )
        worst = [0.0] * len(weights)
        if of_gradient == TOLERANCE["fp32"][1]:
            told = [
                worst_error(whole, parts, own, of_gradient, SMALLEST * math.sqrt(sums[2 * n + 1]))
                for n, own in enumerate(weights)
            ]
            worst = [max(column) for column in zip(*all_gather_values(self._engine, told))]
        errors = []
        for n, own in enumerate(weights):
            found = sum(w * part.loss for part, w in zip(parts, own) if w)
            scale = max(abs(whole.loss), *(w * abs(p.loss) for p, w in zip(parts, own) if w), 1e-30)
            wrong, size = sums[2 * n : 2 * n + 2]
            error = [
                abs(found - whole.loss) / scale / of_loss,
                math.sqrt(wrong / max(size, 1e-60)) / of_gradient,
                worst[n],
            ]
            adds = self._rules[n].kind == "sum" or math.isclose(
                sum(counts_of(whole, parts, n)),
                whole.counts[n],
                rel_tol=1e-5 if self._rules[n] is GRAPH else 1e-6,  # a mean may divide by n + 1e-5
            )
            errors.append(max(error) if adds and not any(map(math.isnan, error)) else math.inf)
        return errors

    def _repeats(self, whole: TrialLoss, rule: ReductionRule, *, training: bool) -> bool:
        """Return whether repeated samples give the loss predicted by the rule. Means that divide by
        no values are not checked. A denominator may be clamped to a minimum. Collective."""
        if rule.kind != "sum" and all(value == 1.0 for value in whole.values):
            return True
        times = max(2, 2 * self._place.size // self._samples)
        expected = TrialLoss(None, loss=whole.loss * (times if rule.kind == "sum" else 1))
        found = self._try_repeated(self._samples, times, training=training)
        return is_trial_close(self._engine, found, expected)

    def _exceeds_rounding(
        self, error: float, rule: int, first: TrialLoss, *, training: bool
    ) -> bool:
        """Return whether a small error exceeds rounding. A weak coupling, such as a balancing term
        with a small weight, has an error within the tolerance. Collective."""
        if error <= DOUBTFUL or tolerance_of(self._engine) != TOLERANCE["fp32"]:
            return False
        twice = self._try_repeated(1, 2, training=training)
        rounding = self._errors((twice, first, first))[rule]
        return error > ROUNDINGS * rounding

    def _are_apart(self, parts: Sequence[TrialLoss], *, training: bool) -> bool:
        """Return whether two micro-batches of a step give the losses of each alone. Collective."""
        if self._engine.places or self._place.most_batches < 2:
            return True
        expected = TrialLoss(None, loss=sum(part.loss for part in parts))
        if not math.isfinite(expected.loss):  # a part has no labels
            return True
        try:
            found = self._trial(slice(0, self._samples), apart=True, training=training)
        except RuntimeError as error:
            if isinstance(error, GpumixError) or is_out_of_memory(error):
                raise
            raise make_leaked_state_error(self._engine.model) from error
        sums = [part.sums for part in parts if part.sums is not None]
        if len(sums) == len(parts):  # of the mean of two losses
            expected.sums = torch.stack(sums).mean(0)
        return is_trial_close(self._engine, found, expected)

    def _rule(self, trials: Sequence[TrialLoss], errors: Sequence[float]) -> int:
        """Return the index of the rule. Among fitting rules, prefer the rule whose denominator the
        loss was divided by, then the first."""
        holds = [n for n, error in enumerate(errors) if error <= 1]
        if not holds:
            return min(range(len(errors)), key=lambda n: errors[n])
        graph = next((n for n in holds if self._rules[n] is GRAPH), None)
        counted = any(rule.kind == "labels" for rule in self._rules)  # those other than -100
        if trials[0].ignored not in (None, IGNORED_LABEL if counted else None):
            return holds[0] if graph is None else graph
        read = [t for t in trials if t.denominators]
        all_read = len(read) == len(trials)
        if graph is not None and all_read and any(t.values != read[0].values for t in read):
            # The loss divides by a sum of values, which no rule counts. On these samples the sum
            # may equal the number of labels or samples by chance.
            return graph
        for n in holds if read else ():
            if self._rules[n] is not GRAPH and all(
                is_close_to_any(t.counts[n], t.denominators) for t in read
            ):
                return n
        return holds[0]

    def _found(self, rule: int, trials: Sequence[TrialLoss]) -> ReductionRule:
        """Return the rule; a graph rule also gets the labels without which the loss is 0."""
        found = self._rules[rule]
        for n, other in enumerate(self._rules if found is GRAPH else ()):
            if other.kind == "labels" and is_in_proportion(trials, n):
                return replace(found, labels=other.labels, shifted=other.shifted)
        return found

    def _alternatives(
        self, trials: Sequence[TrialLoss], errors: Sequence[float], rule: int
    ) -> tuple[AlternativeRule, ...]:
        """Return the means that no sample has distinguished from the rule."""
        if self._rules[rule].kind not in ("labels", "samples"):
            return ()
        if not trials[0].counts[rule]:
            return ()
        read = [t for t in trials if t.denominators]
        found = []
        for n, other in enumerate(self._rules):
            is_read = all(is_close_to_any(t.counts[n], t.denominators) for t in read)
            ignores = trials[0].ignored is not None and other.kind == "samples"
            if n == rule or other.kind not in ("labels", "samples") or ignores or errors[n] > 1:
                continue
            times = trials[0].counts[n] / trials[0].counts[rule]
            alike = all(math.isclose(t.counts[n], times * t.counts[rule]) for t in trials)
            if is_read and alike:
                found.append(AlternativeRule(other, times))
        return tuple(found)

    def _may_trim(self) -> bool:
        """Return whether padding columns can be cut off without changing results. Collective."""
        there = self._samples if self._own is None else count_samples(self._own)
        last = min(self._samples, there) - 1
        padded = None if self._own is None else _padded(self._own, last)
        known = padded is not None or self._own is None
        if not all(ok for (ok,) in all_gather_values(self._engine, [float(known)])):
            return False
        rows = slice(last, last + 1)
        trials = [self._trial(rows, own=padded, trims=trims) for trims in (True, False)]
        return is_trial_close(self._engine, *trials, same_samples=True)

    def _draws(self, whole: TrialLoss, *, training: bool) -> bool:
        """Return whether other random numbers change the loss of all samples. Collective."""
        other = self._trial(self._slices()[0], start=1, training=training, backward=False)
        return not math.isclose(whole.loss, other.loss, rel_tol=SAME)

    def _couples(self, trials: Sequence[TrialLoss], *, training: bool) -> ModelError:
        """Return the error for losses that do not add up. Collective."""
        whole, first, others = trials
        if self._draws(whole, training=training):
            return make_random_eval_error(self._engine.model)
        names = ", ".join(rule.name for rule in self._rules if rule is not GRAPH)
        return ModelError(
            NOT_OF_PARTS,
            code="loss-not-additive",
            where=type(self._engine.model).__name__,
            why=f"of {self._samples} samples it is {whole.loss:.6g}, of the first one alone "
            f"{first.loss:.6g}, of the others {others.loss:.6g}: neither these nor their gradients "
            f"add up as {names}. Samples of a batch are coupled (batch norm, negatives in the "
            "batch, a balancing term), or several means over unlike numbers are added",
            fix=f"change the loss; {HOW_TO_COUPLE}",
        )

    def _changed(
        self,
        trials: Sequence[TrialLoss],
        errors: Sequence[float],
        known: ReductionRule,
        *,
        training: bool,
    ) -> ModelError:
        """Return the error for losses that no longer add up by the known rule. Collective."""
        found = self._rule(trials, errors)
        if errors[found] > 1 or has_unequal_denominators(trials):
            return self._couples(trials, training=training)
        return ModelError(
            "the loss adds up in another way than when training began",
            code="loss-changed-since-start",
            why=f"it was {known.name}, and is {self._rules[found].name}",
            fix=self._objective.how_to_count,
        )


def _padded(batch: Any, row: int) -> Any:
    """Return the batch with padding at the end of a sample, added if absent. None if the padding of
    the sample is unknown or there are fewer than 4 columns."""
    if not isinstance(batch, dict) or LABELS not in batch or MASK not in batch:
        return None
    width = batch[MASK].shape[-1]
    [own] = find_padding_starts(_only(batch, row), [range(1)])
    if own is None or width < 4:
        return None
    if own < width:
        return fill_padding_with_tokens(batch)
    kept = width - width // 3
    padded = {name: value.clone() for name, value in batch.items()}
    padded[MASK][row, kept:] = 0
    padded[LABELS][row, kept:] = IGNORED_LABEL
    padded[LABELS][row, 1] = batch["input_ids"][row, 1]  # an existing label
    return padded


def _only(batch: Any, row: int) -> Any:
    return select_samples(batch, slice(row, row + 1))
