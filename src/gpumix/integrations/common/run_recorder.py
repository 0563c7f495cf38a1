"""Run files of another library's loop for `gpumix top` and `gpumix report`: the files of a run of
`gpumix train`, with the script in place of the job."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from gpumix.engine.comm.async_read import AsyncRead
from gpumix.engine.engine import Engine
from gpumix.hardware.device import device_in_use
from gpumix.hardware.runtime import is_gpu
from gpumix.hardware.timestamps import make_device_clock
from gpumix.integrations.common.gather import gather_texts
from gpumix.schema.errors import Interrupted
from gpumix.train.monitor.step_timer import StepStamps, StepTimer
from gpumix.train.run_figures.figures import RESUME_EVENT
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import (
    WARM_UP_STEPS,
    ComputedPart,
    RankRecord,
    RunEvent,
    StepRecord,
    by_class,
    compute_median_s,
    speed_of,
)
from gpumix.train.run_log.time_breakdown import TimeBreakdown
from gpumix.train.run_manifest import RunRecord

REPORT_INTERVAL_STEPS = 10  # steps between reports of ranks and classes

T = TypeVar("T")


@dataclass
class _PendingStep:
    """A step given to the device, with its numbers not read yet.

    Attributes:
        numbers: loss, gradient norm, and the denominator of each batch's loss.
        host_s: duration by the host's clock.
    """

    number: int
    numbers: AsyncRead
    ticks: list[StepStamps]
    host_s: float
    learning_rate: float
    part: ComputedPart
    sent_bytes: float


class RunRecorder:
    """Record of a run, on each of its ranks; the first rank writes.

    A step is a call of `next_of` and `computes` for each of its batches, then `step`. On GPUs the
    numbers of a step are read after the next step was given, so the device never waits for the
    record.

    Args:
        folder: of the run's files.
        plans: the class taking the plan in the program.
        steps: the number of steps, `done` included; None if unknown.

    Made on all ranks together.
    """

    _spent: TimeBreakdown  # since the last report of ranks, as is `_sent_bytes`
    _sent_bytes: float
    _computes: bool  # the device has work of the current step

    def __init__(
        self, engine: Engine, folder: Path, *, plans: str, steps: int | None, done: int
    ) -> None:
        self._engine = engine
        self._counted: list[Tensor] = []  # of the current step's batches
        self._computed: list[tuple[int, int | None]] = []
        self._ticks: list[StepStamps] = []
        self._all_tokens = 0
        self._label_a_token = False
        self._watch = StepTimer(make_device_clock(engine.device), engine.comm.clock, engine.copies)
        self._pending: deque[_PendingStep] = deque()
        late = "late" if is_gpu(engine.device) else ""
        # All ranks or none: reports of ranks are collective.
        self._late = all(gather_texts(late, engine.comm, "reading of results"))
        self._stack = ExitStack()
        self._log: RunLog | None = None
        if engine.comm.rank == 0:
            log = RunLog(folder, engine.plan, steps, done=done)
            self._log = self._stack.enter_context(log)
            RunRecord.of_script(plans).save(folder / run_files.RUN)
            if done:
                log.tell(done, RunEvent(RESUME_EVENT, {}, ""))
        self._steps_read = 0
        self._begin_anew()
        self.rest()

    def next_of(self, batches: Iterator[T]) -> T | None:
        """Return the loader's next batch, None at the end; the next computation waits for it."""
        if self._computes:  # the step continues: it has several batches
            self._ticks.append(self._watch.given())
            self._begin_to_wait()
        try:
            return self._watch.next_of(batches)
        except StopIteration:
            return None

    def computes(self) -> None:
        """Note that the device is about to get a batch's work."""
        if not self._computes:
            self._computes = True
            self._watch.computes()

    def batch(self) -> None:
        """Note the computation of a batch, of several in the step."""
        self._counted.append(self._engine.losses_counted)
        self._computed += self._engine.computed

    def step(
        self, number: int, *, loss: Tensor, learning_rate: float, norm: Tensor | float | None
    ) -> None:
        """Note the end of a step on the host. Collective after every `REPORT_INTERVAL_STEPS`."""
        self.computes()  # the record rested within the step
        ticks, self._ticks = [*self._ticks, self._watch.given()], []
        counted, self._counted = self._counted or [self._engine.losses_counted], []
        norm = norm if isinstance(norm, Tensor) else loss.new_full((), norm or 0.0)
        given = _PendingStep(
            number,
            AsyncRead([loss, norm, *counted]),
            ticks,
            time.perf_counter() - self._last,
            learning_rate,
            self._part(),
            self._engine.comm.sent.total() - self._sent_before,
        )
        self.rest()
        self._pending.append(given)
        while len(self._pending) > int(self._late):
            self._read()

    def _read(self) -> None:
        """Read the oldest unread step, waiting until the device has finished it."""
        given = self._pending.popleft()
        loss, norm, *counted = given.numbers.numbers()
        device_s = 0.0
        for ticks in given.ticks:
            self._watch.read(ticks)
            device_s += self._watch.step_s
        step_s = device_s if self._late else given.host_s
        spent = self._watch.take()
        tokens = sum(self._tokens_of(int(count)) for count in counted)
        if self._steps_read == WARM_UP_STEPS:
            self._forget_times()
        self._steps_read += 1
        self._unreported += 1
        self._sent_bytes += given.sent_bytes
        self._spent = self._spent.and_then(spent)
        self._times.append(step_s)
        self._tokens.append(tokens)
        self._parts.append(given.part)
        self._all_tokens += tokens
        if self._log is not None:
            record = StepRecord(
                step=given.number,
                loss=loss,
                learning_rate=given.learning_rate,
                gradient_norm=norm,
                step_s=step_s,
                tokens_per_s=tokens / step_s,
                tokens=self._all_tokens,
                shares=spent.shares(),
                samples=self._engine.plan.global_batch,
            )
            self._log.reduction(given.number, self._engine.reduction)
            self._log.step(record)
        if self._unreported == REPORT_INTERVAL_STEPS:
            self._classes(given.number)
            self.rest()

    def _read_all(self) -> None:
        while self._pending:
            self._read()

    def _classes(self, step: int) -> None:
        """Report on ranks and classes since the last report. Collective."""
        told = gather_texts(self._own().to_json(), self._engine.comm, "gathering of records")
        self._begin_anew()
        if self._log is not None:
            records = [RankRecord.from_json(text) for text in told]
            self._log.classes(step, by_class(self._engine.plan, records))
            self._log.ranks(step, records)
            self._log.report_starvation(step, records)

    def _begin_anew(self) -> None:
        """Start collecting for the next report of ranks."""
        self._unreported = 0
        self._sent_bytes = 0.0
        self._forget_times()

    def _forget_times(self) -> None:
        """Leave the steps so far out of the next report's times."""
        self._times: list[float] = []
        self._tokens: list[float] = []
        self._parts: list[ComputedPart] = []
        self._spent = TimeBreakdown.of(0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def rest(self) -> None:
        """Exclude the time since the last step from the next step."""
        self._last = time.perf_counter()
        self._sent_before = self._engine.comm.sent.total()
        self._begin_to_wait()

    def _begin_to_wait(self) -> None:
        self._computes = False
        self._watch.begin()

    def evaluation(self, step: int, loss: float) -> None:
        self._read_all()
        if self._log is not None:
            self._log.evaluation(step, loss)
        self.rest()

    def checkpoint(self, step: int, path: Path) -> None:
        """Note a checkpoint written since the last step."""
        seconds = time.perf_counter() - self._last
        self._read_all()
        if self._log is not None:
            self._log.checkpoint(step, path, seconds=seconds, stalled_s=seconds)
        self.rest()

    def finish(self, step: int) -> None:
        """End the record after all steps. Collective."""
        self._read_all()
        if self._unreported:
            self._classes(step)
        self.close()

    def close(self) -> None:
        """End the record with the program; other ranks may be gone."""
        self._tell_of_what_is_there()
        self._stack.close()

    def fail(self, error: BaseException) -> None:
        """End the record by an error or an interrupt."""
        self._tell_of_what_is_there()
        told = (
            Interrupted("interrupted", code="interrupted")
            if isinstance(error, KeyboardInterrupt)
            else error
        )
        self._stack.__exit__(type(told), told, told.__traceback__)

    def _tell_of_what_is_there(self) -> None:
        """Read steps finished by the device, without waiting and without other ranks."""
        with suppress(Exception):
            while self._pending and self._pending[0].numbers.is_complete:
                if self._unreported == REPORT_INTERVAL_STEPS - 1:
                    return
                self._read()

    def _own(self) -> RankRecord:
        engine, plan = self._engine, self._engine.plan
        worker = plan.workers[engine.comm.rank]
        step_s = compute_median_s(self._times)
        tokens = compute_median_s(self._tokens) * worker.samples / plan.global_batch
        speed = speed_of(plan, engine.comm.rank, step_s, tokens, ComputedPart.mean(self._parts))
        runtime = device_in_use()
        shares = self._spent.shares()
        return RankRecord(
            device=worker.device,
            device_class=worker.device_class,
            busy_share=shares.compute,
            peak_bytes=None if runtime is None else runtime.peak_bytes(),
            overruns=0 if runtime is None else runtime.overruns,
            reserved_bytes=None if runtime is None else runtime.peak_reserved_bytes(),
            retries=0 if runtime is None else runtime.allocator_retries,
            sent_bytes=self._sent_bytes / max(1, self._unreported),
            shares=shares,
            starved_share=self._watch.starvation.share,
            tokens_per_s=speed.tokens_per_s,
            mfu=speed.mfu,
            hfu=speed.hfu,
        )

    def _part(self) -> ComputedPart:
        """Return the computed part of the plan's batch in a step, which may have several
        batches."""
        plan = self._engine.plan
        computed, self._computed = self._computed or self._engine.computed, []
        samples = plan.workers[self._engine.comm.rank].samples
        return ComputedPart.of(computed, samples, plan.sequence_length)

    def _tokens_of(self, counted: int) -> int:
        """Return the tokens of a batch: the `counted` labels, or all tokens if each sample has a
        single label. The last batch of an epoch may be small."""
        plan = self._engine.plan
        self._label_a_token = self._label_a_token or counted > plan.global_batch
        return counted if self._label_a_token else plan.global_batch * plan.sequence_length


class TrainingRecorder:
    """Recorder of a loop, from its begin to its end; a no-op before, after, and without a record.

    Attributes:
        loss: of a step not recorded yet.
    """

    def __init__(self) -> None:
        self._recorded: RunRecorder | None = None
        self.loss: Tensor | None = None

    def begin(
        self, engine: Engine, folder: Path, *, plans: str, steps: int | None, done: int
    ) -> None:
        """Begin a record; see `RunRecorder`. Collective."""
        self._recorded = RunRecorder(engine, folder, plans=plans, steps=steps, done=done)
        self.loss = None

    def next_of(self, batches: Iterator[T]) -> T | None:
        """Return the next batch, None at the end."""
        if self._recorded is None:
            return next(batches, None)
        return self._recorded.next_of(batches)

    def computes(self) -> None:
        if self._recorded is not None:
            self._recorded.computes()

    def step(self, number: int, *, learning_rate: float, norm: Tensor | float) -> None:
        """Record a step, if its loss is not recorded yet."""
        if self._recorded is not None and self.loss is not None:
            loss, self.loss = self.loss, None
            self._recorded.step(number, loss=loss, learning_rate=learning_rate, norm=norm)

    def rest(self) -> None:
        if self._recorded is not None:
            self._recorded.rest()

    def evaluation(self, step: int, loss: float) -> None:
        if self._recorded is not None:
            self._recorded.evaluation(step, loss)

    def checkpoint(self, step: int, path: Path) -> None:
        if self._recorded is not None:
            self._recorded.checkpoint(step, path)

    def finish(self, step: int) -> None:
        """End the record after all steps. Collective."""
        if (recorded := self._taken()) is not None:
            recorded.finish(step)

    def close(self) -> None:
        """End the record with the program."""
        if (recorded := self._taken()) is not None:
            recorded.close()

    def fail(self, error: BaseException) -> None:
        if (recorded := self._taken()) is not None:
            recorded.fail(error)

    def _taken(self) -> RunRecorder | None:
        recorded, self._recorded = self._recorded, None
        return recorded
