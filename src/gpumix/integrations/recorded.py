"""What another library's loop leaves of a run for `gpumix top` and `gpumix report`: the same files
as a run of `gpumix train`, with the script in place of the job."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from gpumix.engine.engine import Engine
from gpumix.engine.reading import Reading
from gpumix.hardware.device import device_in_use
from gpumix.hardware.runtime import is_gpu
from gpumix.hardware.stamps import stamps_of
from gpumix.integrations.gathering import all_texts
from gpumix.spec.errors import Interrupted
from gpumix.train import run_files
from gpumix.train.account import Account
from gpumix.train.metrics import Part, RankRecord, RunLog, StepRecord, by_class, speed_of, typical_s
from gpumix.train.run_record import RunRecord
from gpumix.train.watch import Ticks, Watch

CLASSES_STEPS = 10  # after so many it is told how ranks and classes did

T = TypeVar("T")


@dataclass
class _Given:
    """A step that the device was given, and whose numbers are on their way.

    Attributes:
        numbers: loss, gradient norm, and what the loss of each batch is a mean over.
        host_s: what it took by the host's clock.
    """

    number: int
    numbers: Reading
    ticks: list[Ticks]
    host_s: float
    learning_rate: float
    part: Part
    sent_bytes: float


class Recorded:
    """The record of one run, on each of its ranks; the first one writes. A step is `next_of` the
    loader and `computes`, once for each batch that it is made of, then `step`. On GPUs what a step
    came to is read when the next one was given, so that none waits for the record.

    Args:
        folder: of the run's files.
        plans: the class that takes the plan in the program.
        steps: how many there will be, None where nobody knows; `done` of them are.

    Made on all ranks together.
    """

    _spent: Account  # since it was told how ranks did, as is what was sent
    _sent_bytes: float
    _computes: bool  # the device has got work of the step under way

    def __init__(
        self, engine: Engine, folder: Path, *, plans: str, steps: int | None, done: int
    ) -> None:
        self._engine = engine
        self._counted: list[Tensor] = []  # of the batches of the step under way
        self._computed: list[tuple[int, int | None]] = []
        self._ticks: list[Ticks] = []
        self._all_tokens = 0
        self._label_a_token = False
        self._watch = Watch(stamps_of(engine.device), engine.comm.clock, engine.copies)
        self._pending: deque[_Given] = deque()
        late = "late" if is_gpu(engine.device) else ""
        # All ranks, or none: they tell each other how they did.
        self._late = all(all_texts(late, engine.comm, "reading of results"))
        self._stack = ExitStack()
        self._log: RunLog | None = None
        if engine.comm.rank == 0:
            log = RunLog(folder, engine.plan, steps, done=done)
            self._log = self._stack.enter_context(log)
            RunRecord.of_script(plans).save(folder / run_files.RUN)
        self._begin_anew()
        self.rest()

    def next_of(self, batches: Iterator[T]) -> T | None:
        """The next batch of the loader, None behind the last; what is computed next waits for
        it."""
        if self._computes:  # the step is not done: it is made of several batches
            self._ticks.append(self._watch.given())
            self._begin_to_wait()
        try:
            return self._watch.next_of(batches)
        except StopIteration:
            return None

    def computes(self) -> None:
        """The device is about to get the work of a batch."""
        if not self._computes:
            self._computes = True
            self._watch.computes()

    def batch(self) -> None:
        """One of several that a step is made of was computed."""
        self._counted.append(self._engine.losses_counted)
        self._computed += self._engine.computed

    def step(
        self, number: int, *, loss: Tensor, learning_rate: float, norm: Tensor | float | None
    ) -> None:
        """One that is done, as far as the host is concerned. Collective after every
        `CLASSES_STEPS`."""
        self.computes()  # it rested in the middle of the step
        ticks, self._ticks = [*self._ticks, self._watch.given()], []
        counted, self._counted = self._counted or [self._engine.losses_counted], []
        norm = norm if isinstance(norm, Tensor) else loss.new_full((), norm or 0.0)
        given = _Given(
            number,
            Reading([loss, norm, *counted]),
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
        """The oldest step that was not read yet; waits until the device is done with it."""
        given = self._pending.popleft()
        loss, norm, *counted = given.numbers.numbers()
        device_s = 0.0
        for ticks in given.ticks:
            self._watch.read(ticks)
            device_s += self._watch.step_s
        step_s = device_s if self._late else given.host_s
        spent = self._watch.take()
        self._spent = self._spent.and_then(spent)
        self._sent_bytes += given.sent_bytes
        tokens = sum(self._tokens_of(int(count)) for count in counted)
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
        if len(self._times) == CLASSES_STEPS:
            self._classes(given.number)
            self.rest()

    def _read_all(self) -> None:
        while self._pending:
            self._read()

    def _classes(self, step: int) -> None:
        """How ranks and classes did since it was told last. Collective."""
        told = all_texts(self._own().to_json(), self._engine.comm, "gathering of records")
        self._begin_anew()
        if self._log is not None:
            records = [RankRecord.from_json(text) for text in told]
            self._log.classes(step, by_class(self._engine.plan, records))
            self._log.ranks(step, records)
            self._log.starved(step, records)

    def _begin_anew(self) -> None:
        """With what steps came to since it was told how ranks did."""
        self._times: list[float] = []
        self._tokens: list[float] = []
        self._parts: list[Part] = []
        self._spent = Account.of(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._sent_bytes = 0.0

    def rest(self) -> None:
        """What was done since the last step is no part of the next one."""
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
        """One that was written since the last step."""
        seconds = time.perf_counter() - self._last
        self._read_all()
        if self._log is not None:
            self._log.checkpoint(step, path, seconds=seconds, stalled_s=seconds)
        self.rest()

    def finish(self, step: int) -> None:
        """All steps are done. Collective."""
        self._read_all()
        if self._times:
            self._classes(step)
        self.close()

    def close(self) -> None:
        """The program ends, and other ranks may be gone."""
        self._tell_of_what_is_there()
        self._stack.close()

    def fail(self, error: BaseException) -> None:
        """The run ends by an error, or because it was asked to."""
        self._tell_of_what_is_there()
        told = Interrupted("interrupted") if isinstance(error, KeyboardInterrupt) else error
        self._stack.__exit__(type(told), told, told.__traceback__)

    def _tell_of_what_is_there(self) -> None:
        """Of steps that the device is done with, without a wait and without other ranks."""
        with suppress(Exception):
            while self._pending and self._pending[0].numbers.is_there:
                if len(self._times) == CLASSES_STEPS - 1:
                    return
                self._read()

    def _own(self) -> RankRecord:
        engine, plan = self._engine, self._engine.plan
        worker = plan.workers[engine.comm.rank]
        step_s = typical_s(self._times)
        tokens = typical_s(self._tokens) * worker.samples / plan.global_batch
        speed = speed_of(plan, engine.comm.rank, step_s, tokens, Part.mean(self._parts))
        runtime = device_in_use()
        shares = self._spent.shares()
        return RankRecord(
            device=worker.device,
            device_class=worker.device_class,
            busy_share=max(0.0, 1.0 - shares.communication),
            peak_bytes=None if runtime is None else runtime.peak_bytes(),
            overruns=0 if runtime is None else runtime.overruns,
            reserved_bytes=None if runtime is None else runtime.peak_reserved_bytes(),
            retries=0 if runtime is None else runtime.allocator_retries,
            sent_bytes=self._sent_bytes / max(1, len(self._times)),
            shares=shares,
            starved_share=self._watch.starvation.share,
            tokens_per_s=speed.tokens_per_s,
            mfu=speed.mfu,
            hfu=speed.hfu,
        )

    def _part(self) -> Part:
        """What the step computed of the plan's batch, which may be one of several."""
        plan = self._engine.plan
        computed, self._computed = self._computed or self._engine.computed, []
        samples = plan.workers[self._engine.comm.rank].samples
        return Part.of(computed, samples, plan.sequence_length)

    def _tokens_of(self, counted: int) -> int:
        """Those of a batch that have labels, `counted` of them; of samples with one label each all.
        The last batch of an epoch may be small."""
        plan = self._engine.plan
        self._label_a_token = self._label_a_token or counted > plan.global_batch
        return counted if self._label_a_token else plan.global_batch * plan.sequence_length


class Record:
    """What a loop is recorded by, from when it is known to when it ends; until then, behind that,
    and of a loop that is to leave no record, nothing is done."""

    def __init__(self) -> None:
        self._recorded: Recorded | None = None

    def next_of(self, batches: Iterator[T]) -> T | None:
        """The next batch, None behind the last."""
        if self._recorded is None:
            return next(batches, None)
        return self._recorded.next_of(batches)

    def computes(self) -> None:
        if self._recorded is not None:
            self._recorded.computes()

    def rest(self) -> None:
        if self._recorded is not None:
            self._recorded.rest()

    def checkpoint(self, step: int, path: Path) -> None:
        if self._recorded is not None:
            self._recorded.checkpoint(step, path)

    def finish(self, step: int) -> None:
        """All steps are done. Collective."""
        if (recorded := self._taken()) is not None:
            recorded.finish(step)

    def close(self) -> None:
        """The program ends."""
        if (recorded := self._taken()) is not None:
            recorded.close()

    def fail(self, error: BaseException) -> None:
        if (recorded := self._taken()) is not None:
            recorded.fail(error)

    def _taken(self) -> Recorded | None:
        recorded, self._recorded = self._recorded, None
        return recorded
