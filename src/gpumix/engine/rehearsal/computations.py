"""Computations of a rehearsal: forward and backward of a few samples, without a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.engine.batch.batch_split import copy_batch, count_samples, select_samples
from gpumix.engine.loss.loss_graph import kind_of
from gpumix.engine.loss.reduction import LossProbe, ObjectiveWithRule
from gpumix.engine.model.module_buffers import BufferCopies
from gpumix.engine.model.rng import use_eval_mode, use_training_mode
from gpumix.engine.rehearsal.observations import TrialLoss, sum_gradients
from gpumix.engine.rehearsal.refusals import (
    UNUSED_GRAPH_MESSAGE,
    count_in_place_changes,
    make_changed_weight_error,
    make_few_samples_error,
    make_gradient_loss_error,
    make_leaked_state_error,
    refuse_any,
)
from gpumix.engine.rehearsal.samples import (
    MORE_SAMPLES,
    SAMPLES,
    RehearsalMicroBatch,
    all_gather_values,
)
from gpumix.engine.trial_steps import TrialSteps
from gpumix.hardware.memory_limit import is_out_of_memory

MOST_RULES = 12
MOST_KINDS = 8  # of losses in one rehearsal


class TrialRunner:
    """Trials with a few samples of a batch.

    Args:
        batch: this rank's batch, of which only the form matters; `own` has the samples computed
            here, if any.
        place: micro-batch in which the samples are computed.
        most: largest number of samples at once, unless a micro-batch has fewer. For micro-batches
            of one sample, too small to cut, `SAMPLES` are computed, without gradients.
    """

    def __init__(
        self,
        engine: TrialSteps,
        batch: Any,
        own: Any,
        place: RehearsalMicroBatch,
        objective: ObjectiveWithRule,
        most: int = SAMPLES,
    ) -> None:
        self._engine = engine
        self._nothing = select_samples(batch, slice(0))
        self._own = own
        self._place = place
        self._objective = objective
        self._rules = objective.rules(batch)
        self._samples = min(most, place.size)
        if place.size == 1:
            self._samples = 2
            self._take_more_samples(SAMPLES)
        self._training: list[nn.Module] = []
        self._kinds: set[int] = set()  # kinds of losses seen
        self._ran = False  # the model has computed several samples at once

    def made(self, run: Callable[[nn.Module, Any], Any], start: int) -> list[Any]:
        """Return the results of `run` for all samples and for two parts; see `in_parts`."""
        found: list[Any] = []

        def objective(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            found.append(run(model, batch))
            return torch.zeros(()), torch.zeros(())

        for some in self._slices():
            own = self._nothing if self._own is None else select_samples(self._own, some)
            rows = self._rows(range(start, start + count_samples(own)))
            with use_eval_mode(self._engine.model):
                self._engine.tried(
                    own, rows, objective, trims=False, backward=False, seen=lambda pieces: None
                )
        return found

    def _slices(self) -> tuple[slice, slice, slice]:
        """Return slices of the samples: all, and two unequal parts."""
        return slice(0, self._samples), slice(0, 1), slice(1, self._samples)

    def _take_more_samples(self, most: int = MORE_SAMPLES) -> bool:
        """Compute more samples at once from here on, if there are more. Collective."""
        own = 0 if self._own is None else count_samples(self._own)
        there = max(int(number) for (number,) in all_gather_values(self._engine, [float(own)]))
        before, self._samples = self._samples, max(self._samples, min(there, most))
        return self._samples > before

    def is_denominator_doubled(self) -> bool:
        """Return True if doubling the samples of a micro-batch doubles the loss's denominators.
        Collective."""
        once = self._trial(slice(0, self._place.size))
        again = self._try_repeated(self._place.size, 2)
        pairs = zip(once.denominators, again.denominators)
        return all(math.isclose(two, 2 * one, rel_tol=1e-4) for one, two in pairs)

    def _try_repeated(self, samples: int, times: int, *, training: bool = False) -> TrialLoss:
        """Try the first samples, each repeated `times` times, at once."""
        own = None if self._own is None else select_samples(self._own, [*range(samples)] * times)
        return self._trial(slice(0, times * samples), own=own, training=training)

    def _kinds_seen(self) -> list[int]:
        """Return the kinds of all losses seen on any rank. Collective."""
        told = sorted(self._kinds)[:MOST_KINDS]
        table = all_gather_values(
            self._engine, [*map(float, told), *[0.0] * (MOST_KINDS - len(told))]
        )
        return sorted({int(kind) for row in table for kind in row if kind})

    def alone(self) -> TrialLoss:
        """Try the first sample alone."""
        return self._trial(slice(0, 1))

    def _trial(
        self,
        rows: slice,
        *,
        own: Any = None,
        training: bool = False,
        start: int = 0,
        trims: bool = False,
        apart: bool = False,
        backward: bool = True,
    ) -> TrialLoss:
        """Run forward and backward of some samples at once. With `apart`, the first sample is in a
        micro-batch of its own, next to a micro-batch with the rest. Collective.

        Args:
            start: position given to the first sample: another position draws other numbers.
            trims: True to cut off padding columns.
            backward: True to compute gradients, if memory allows.
        """
        engine = self._engine
        own = self._own if own is None else own
        some = self._nothing
        if own is not None:
            some = copy_batch(select_samples(own, rows))
        probes: list[LossProbe] = []

        # A step computes micro-batches of the same size, and as many; more may not fit in memory.
        fits = rows.stop - rows.start - apart <= self._place.size
        backward &= fits and engine.trains and (not apart or self._place.batches > 1)

        def objective(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            self._objective.whole = number = count_samples(batch)
            try:
                with torch.enable_grad():  # the head's graph shows the loss's denominator
                    found = self._objective.probe(model, batch)
                if number > 1 or self._place.size == 1:  # a mean of one is like a sum
                    self._kinds.add(kind_of(found.loss))
                probes.append(found if backward else replace(found, loss=found.loss.detach()))
            except (IndexError, RuntimeError, ValueError) as error:
                if UNUSED_GRAPH_MESSAGE in str(error):
                    raise make_gradient_loss_error(model) from error
                if not self._ran or is_out_of_memory(error):
                    raise
                if apart:
                    raise make_leaked_state_error(model) from error
                raise make_few_samples_error(model, number, error) from error
            return probes[-1].loss.float(), torch.ones((), device=probes[-1].loss.device)

        copies = BufferCopies(engine.keepers)
        before = count_in_place_changes(engine)
        try:
            with use_training_mode(engine.model, training or self._training):
                sums = engine.tried(
                    some,
                    self._rows(range(start, start + count_samples(some)), apart=apart),
                    objective,
                    trims=trims,
                    backward=backward,
                    seen=sum_gradients if backward else lambda parameters: None,
                )
        except (IndexError, ValueError) as error:  # of a block, such as batch norm
            if not self._ran:
                raise
            raise make_few_samples_error(engine.model, count_samples(some), error) from error
        trial = TrialLoss(sums)
        self._ran = self._ran or count_samples(some) > 1  # only the last stage sees a loss
        trial.changed = copies.keep_changed()
        copies.restore()
        refuse_any(engine, make_changed_weight_error(before, count_in_place_changes(engine)))
        self._tell(trial, probes if engine.tells_losses else [])
        return trial

    def _rows(self, own: range, *, apart: bool = False) -> tuple[range, ...]:
        """Return the rows of each of this rank's micro-batches; samples are in one, or in two."""
        places, number = self._engine.places, self._place.number
        if not places:
            if number is None:
                return ()
            return (own[:1], own[1:]) if apart else (own,)
        return tuple(own if n == number else range(0) for n in range(len(places[0].batches)))

    def _tell(self, trial: TrialLoss, probes: Sequence[LossProbe]) -> None:
        """Share the observations of the rank that computed the losses with all ranks."""
        told = [0.0] * (3 + 3 * MOST_RULES)
        if probes:
            probe = probes[-1]
            found = [1.0, math.nan if probe.ignored is None else float(probe.ignored)]
            found += [math.fsum(float(one.loss.detach()) for one in probes)]
            found += [float(count.detach()) for count in probe.counts][:MOST_RULES]
            found += [math.nan] * (3 + MOST_RULES - len(found))
            found += [float(one) for one in probe.denominators][:MOST_RULES]
            found += [math.nan] * (3 + 2 * MOST_RULES - len(found))
            found += [float(one) for one in probe.values][:MOST_RULES]
            told = found + [math.nan] * (len(told) - len(found))
        row = next(row for row in all_gather_values(self._engine, told) if row[0])
        trial.ignored = None if math.isnan(row[1]) else int(row[1])
        trial.loss, trial.counts = row[2], row[3 : 3 + MOST_RULES]
        ends = 3 + MOST_RULES, 3 + 2 * MOST_RULES
        trial.denominators = [d for d in row[ends[0] : ends[1]] if not math.isnan(d)]
        trial.values = [d for d in row[ends[1] :] if not math.isnan(d)]
