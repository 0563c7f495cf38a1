"""Steps of a rank: issued to the device in turn, and read later.

Reading the loss at once leaves a GPU idle until the host has reported it to all ranks and prepared
the next step. So with a GPU the host issues the next step first. A bad step changes nothing
meanwhile (`engine.update_guard`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from gpumix.engine.comm.async_read import AsyncRead
from gpumix.engine.comm.step_exchange import StepTable
from gpumix.engine.comm.step_recorder import SILENT
from gpumix.engine.engine import Engine
from gpumix.engine.update_guard import UpdateGuard, can_skip_updates, is_first_momentum_step
from gpumix.hardware import runtime
from gpumix.hardware.timestamps import make_device_clock
from gpumix.schema.plan.stage import Worker
from gpumix.schema.profile.profile import ROOT
from gpumix.train.monitor.step_history import StepHistory
from gpumix.train.monitor.step_timer import StepStamps, StepTimer
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.rank_setup.optimizer import compute_learning_rate, set_learning_rates
from gpumix.train.run_log.metrics import ComputedPart, StepRecord
from gpumix.train.state_keeper import TrainingParts

REPORTED_SAMPLES = 8  # samples reported of a bad step


class Results:
    """Results of a step, on the way to the host.

    Args:
        exchanged: values exchanged by all ranks in the step.
        loss, norm: of the step, on the device.
    """

    def __init__(self, exchanged: StepTable, loss: torch.Tensor, norm: torch.Tensor) -> None:
        self._reading = AsyncRead([exchanged.table, loss, norm])

    @property
    def are_there(self) -> bool:
        """True if `read` does not wait."""
        return self._reading.is_complete

    def read(self) -> tuple[StepTable, float, float]:
        """Return the exchanged values, the loss and the gradient norm; wait for the device."""
        table, loss, norm = self._reading.tensors()
        return StepTable(table), loss.item(), norm.item()


@dataclass(frozen=True)
class IssuedStep:
    """Facts of a step known once all its work is issued.

    Attributes:
        number: counted from 1.
        results: results to come.
        cursor: position of the data before the step; `samples` are some of this rank's.
        learning_rate: of parameters whose group has none of its own.
        tokens: of all ranks in the step, `own_tokens` of this rank, `all_tokens` of the run so far.
        part: computed fraction of this rank's plan.
        samples_of_batch: of all ranks.
        ticks: stamps by the device's clock.
        host_s: duration by the host's clock, where valid; else None.
        sent_bytes: sent by this rank since the run began, up to issuing the step.
    """

    number: int
    results: Results
    cursor: dict[str, Any]
    samples: Sequence[int]
    learning_rate: float
    tokens: int
    own_tokens: int
    all_tokens: int
    part: ComputedPart
    samples_of_batch: int
    ticks: StepStamps
    host_s: float | None
    sent_bytes: float


@dataclass(frozen=True)
class ReadStep:
    """Step with known results: the record to report, and the values exchanged by all ranks."""

    given: IssuedStep
    record: StepRecord
    exchanged: StepTable


@dataclass(frozen=True)
class BadStep:
    """Step with a non-finite loss or gradient norm (`what`). No weights changed, and all further
    changes in the engine are taken back. `cursor` and `samples` are as in `IssuedStep`."""

    what: str
    value: float
    exchanged: StepTable
    cursor: dict[str, Any]
    samples: Sequence[int]


class IssuedSteps:
    """Steps issued to a rank's device, and read later.

    Attributes:
        given: number of steps issued, of the run's.
        plan: of the next step.
        taken: the steps read.
        late: whether results may be read after issuing the next step, on all ranks; otherwise each
            step is read before the next.

    Args:
        parts: `keeping` is settled before each change of the state.
        done: number of steps completed before.
        not_finite: called with a bad step; raises.

    Created on all ranks together.
    """

    def __init__(
        self,
        context: RankContext,
        parts: TrainingParts,
        *,
        done: int,
        not_finite: Callable[[BadStep], NoReturn],
    ) -> None:
        self._context, self._job, self._rank = context, context.job, context.ranks.rank
        engine, optimizer, loader = parts.engine, parts.optimizer, parts.loader
        self._engine, self._optimizer, self._loader = engine, optimizer, loader
        self._keeping, self._not_finite = parts.keeping, not_finite
        self.plan = engine.plan
        self.taken = StepHistory(context.runtime)
        self.watch = StepTimer(make_device_clock(engine.device), engine.comm.clock, engine.copies)
        self.given = self._begun_at = done
        self._tokens = self._tokens_at(0, loader.cursor.position)
        self._pending: deque[IssuedStep] = deque()  # oldest first
        guard = _guard_of(engine, optimizer)
        # All ranks or none: ranks act together on the results of a step.
        told = context.ranks.gather("results", "" if guard is None else "late")
        self.late = all(told)
        self._guard = guard if self.late else None

    @property
    def unread(self) -> int:
        """Number of steps issued and not read."""
        return len(self._pending)

    @property
    def is_next_ready(self) -> bool:
        """True if `read` has a step and does not wait for the device."""
        return bool(self._pending) and self._pending[0].results.are_there

    def give(self, begins: Callable[[], float]) -> None:
        """Issue a step to the device: fetch, forward and backward, clip, update.

        Args:
            begins: called when the batch is there; its result goes to all ranks in the step:
                `Engine.notice`.
        """
        engine, watch = self._engine, self.watch
        record = engine.comm.record
        begun = record.begin()
        watch.begin()
        cursor, begin = self._loader.state_dict(), self._loader.cursor.position
        batch = watch.next_of(self._loader)
        self._context.runtime.idle()
        rate = compute_learning_rate(self._job, self.given)
        set_learning_rates(self._optimizer, self._job, self.given)
        engine.notice = begins()
        engine.report = watch.computed_s if self.taken.times_s else 0.0
        results = self._compute(batch, cursor)
        ticks = watch.given()
        host_s = record.end() - begun
        tokens = self._tokens_at(begin, self._loader.cursor.position)
        self._tokens += tokens
        self.given += 1
        self._pending.append(
            IssuedStep(
                number=self.given,
                results=results,
                cursor=cursor,
                samples=self._some_samples(),
                learning_rate=rate,
                tokens=tokens,
                own_tokens=self._tokens_of_own(),
                all_tokens=self._tokens,
                part=ComputedPart.of(engine.computed, self._own.samples, self.plan.sequence_length),
                samples_of_batch=self.plan.global_batch,
                ticks=ticks,
                # A recorder waits for the device, which makes this time valid.
                host_s=None if self.late and record is SILENT else host_s,
                sent_bytes=engine.comm.sent.total(),
            )
        )

    def _compute(self, batch: Any, cursor: dict[str, Any]) -> Results:
        """Run forward and backward of a batch whose data begins at `cursor`, and the update."""
        engine, optimizer, max_norm = self._engine, self._optimizer, self._job.max_grad_norm
        # Without clipping an update needs no norm over all gradients.
        early = max_norm is None and engine.may_update_early(optimizer)
        if early:
            self._keeping.settle(self.given + 1)
            engine.guard = self._guard_now()
        self.watch.computes()
        loss = engine.step(batch, optimizer if early else None)
        # Before the ranks agree on the norm: see `memory_checkpoint`.
        self._keeping.settle(self.given + 1)
        norm = engine.gradient_norm() if max_norm is None else engine.clip_grad_norm_(max_norm)
        results, guard = Results(engine.exchanged, loss, norm), self._guard_now()
        if guard is None:
            self._read_finite_results(results, cursor, self._some_samples())
        else:
            guard.see(loss, norm)
        engine.comm.record.computes("optimizer", ROOT)
        if not early:
            with nullcontext() if guard is None else guard.over(optimizer):
                optimizer.step()
        optimizer.zero_grad()
        if not self.late:
            self._context.runtime.synchronize()
        return results

    def _guard_now(self) -> UpdateGuard | None:
        """Return the guard of the present step's update, replacing a check by the host; None if the
        host checks."""
        first = self.given == self._begun_at
        return None if first or is_first_momentum_step(self._optimizer) else self._guard

    def read(self) -> ReadStep:
        """Return the oldest step not read yet; wait until the device is done with it.

        Raises:
            TrainingError: the loss, or the gradient norm, is not finite.
        """
        given = self._pending.popleft()
        exchanged, loss, norm = self._read_finite_results(
            given.results, given.cursor, given.samples
        )
        self.watch.read(given.ticks)
        step_s = self.watch.step_s if given.host_s is None else given.host_s
        self.taken.add(step_s, loss, given.tokens, given.own_tokens, given.part)
        record = StepRecord(
            step=given.number,
            loss=loss,
            learning_rate=given.learning_rate,
            gradient_norm=norm,
            step_s=step_s,
            tokens_per_s=given.tokens / step_s,
            tokens=given.all_tokens,
            shares=self.watch.last() if self._context.first else None,
            samples=given.samples_of_batch,
        )
        return ReadStep(given, record, exchanged)

    def _read_finite_results(
        self, results: Results, cursor: dict[str, Any], samples: Sequence[int]
    ) -> tuple[StepTable, float, float]:
        """Read the results of a step; if not finite, take back all pending steps and call
        `not_finite`. The data begins at `cursor`; `samples` are some of this rank's."""
        exchanged, loss, norm = results.read()
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                for _ in (*self._pending, "the bad one"):
                    self._engine.take_back_step()
                self._pending.clear()
                self._not_finite(BadStep(what, value, exchanged, cursor, samples))
        return exchanged, loss, norm

    @property
    def _own(self) -> Worker:
        return self.plan.workers[self._rank]

    def _some_samples(self) -> Sequence[int]:
        some: list[int] = self._loader.last_indices[:REPORTED_SAMPLES].tolist()
        return some

    def lengths(self) -> list[list[int]]:
        """Return the tokens of the last batch's samples, by micro-batch; empty if samples are
        alike."""
        known = self._context.train_data.lengths
        if known is None:
            return []
        sizes = [len(rows) for rows in self.plan.rows_of(self._rank)]
        lengths = known[self._loader.last_indices].tolist()
        ends = list(accumulate(sizes))
        return [lengths[end - n : end] for n, end in zip(sizes, ends) if n]

    def _tokens_at(self, start: int, stop: int) -> int:
        """Count the tokens of samples at these positions of the order, without padding if known."""
        counted = self._loader.course.tokens(start, stop)
        return (stop - start) * self.plan.sequence_length if counted is None else counted

    def _tokens_of_own(self) -> int:
        """Count the tokens of this rank's samples in the last step, like `_tokens_at`."""
        if self._context.train_data.lengths is not None:
            return sum(map(sum, self.lengths()))
        return self._own.samples * self.plan.sequence_length


def _guard_of(engine: Engine, optimizer: Optimizer) -> UpdateGuard | None:
    """Return the guard allowing late reading; None if the host must check each step before its
    update: the device is the host, or the update runs there, or needs the check."""
    late = runtime.is_gpu(engine.device) and not engine.state_on_host
    late &= can_skip_updates(optimizer) and not engine.scaler.active
    return UpdateGuard(engine.device) if late else None
