"""Recording of a rank's activities in one step, with times.

`SILENT` records nothing; every communicator has it except in traced steps. Times are the device's:
on CUDA, events on its streams, read after the step, so that nothing waits for them.
`train.monitor.step_trace` merges the recordings of all ranks.

With one stage, units are recorded; with several, passes of micro-batches through a stage, as in a
schedule.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from gpumix.cost.pipeline_schedule import Action
from gpumix.engine.comm import collective_progress
from gpumix.hardware import runtime
from gpumix.schema.plan.stage import Worker
from gpumix.schema.plan.step_trace import Move, Work, stage_name
from gpumix.schema.profile.profile import ROOT

Operation = Literal["gather", "reduce", "send", "receive"]
Meeting = Literal["tensor parallel", "other stage", "slower rank"]
# Seconds since the step began, available after the step.
Mark = Callable[[], float]


@dataclass(frozen=True)
class Activity:
    """Interval in which a rank computes, waits for the collective of number `move` or for a meeting
    with other ranks, or does neither. For a pass through a stage, `batch` is the number of the
    micro-batch or wave."""

    kind: Literal[Work, Meeting, "waiting", "overhead"]
    unit: str
    start_s: float
    end_s: float
    move: int = -1
    batch: int | None = None


@dataclass(frozen=True)
class RecordedMove:
    """Collective or message, from the moment of issue on this rank to the end on this rank. All
    participants use the same `name`, and issue operations of one name in the same order."""

    kind: Literal[Move, "receive"]
    unit: str
    issued_s: float
    ended_s: float
    name: str = ""
    batch: int | None = None


@dataclass(frozen=True)
class RecordedStep:
    """Recorded step of a rank: activities without gaps, and collectives in order of issue."""

    activities: tuple[Activity, ...]
    moves: tuple[RecordedMove, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RecordedStep:
        told = json.loads(text)
        return cls(
            tuple(Activity(**activity) for activity in told["activities"]),
            tuple(RecordedMove(**move) for move in told["moves"]),
        )


class RecordedRanks(Protocol):
    """Communicator of the ranks that meet at the begin of a recorded step."""

    @property
    def device(self) -> torch.device: ...

    @property
    def members(self) -> Sequence[int]: ...

    def exchange(self, own: torch.Tensor, name: str, /) -> tuple[torch.Tensor, PendingWork]: ...


class PendingWork(Protocol):
    """Collective or message in flight."""

    @property
    def works(self) -> Sequence[dist.Work]: ...

    @property
    def comm(self) -> RecordedRanks: ...

    def wait(self) -> None: ...


class SilentRecorder:
    """Recorder that notes nothing, and only reports the rank's position
    (`engine.comm.collective_progress`)."""

    def begin(self) -> float:
        """Begin a step; return a reading of the host's clock."""
        return time.perf_counter()

    def computes(self, kind: Work, unit: str) -> None:
        """Begin to compute a unit."""
        collective_progress.compute_phase = kind, unit if unit != ROOT else ""

    def passes(self, action: Action) -> None:
        """Begin a pass: all following activities except waits are a part of it."""

    def waits(self, operation: Operation, unit: str) -> None:
        """Begin to wait for a collective or message."""

    def meets(self, whom: Meeting) -> None:
        """Begin to wait for other ranks, outside of the collectives of units."""

    def goes_on(self) -> None:
        """End a wait: continue the activity before it."""

    def overhead(self) -> None:
        """Begin overhead: neither computing nor waiting."""

    def issued(self, operation: Operation, unit: str, parts: Sequence[PendingWork]) -> None:
        """Note a collective issued in `parts`."""

    def passed_on(
        self, operation: Operation, action: Action, name: str, message: PendingWork
    ) -> None:
        """Note an issued message with the result of a pass; `name` identifies the message."""

    def end(self) -> float:
        """End the step; return a reading of the host's clock."""
        collective_progress.compute_phase = "", ""
        return time.perf_counter()


SILENT = SilentRecorder()


class CurrentRecorder:
    """Recorder of the current step, shared by a group of ranks and its parts."""

    now: SilentRecorder = SILENT


class Recorder(SilentRecorder):
    """Recorder of one step of a rank of `comm`, with `worker` as its part of the plan."""

    def __init__(self, comm: RecordedRanks, worker: Worker) -> None:
        self._comm = comm
        self._worker = worker
        self._clock = _StreamClock(comm.device) if runtime.is_gpu(comm.device) else _HostClock()
        self._begun = 0.0
        self._activities: list[tuple[Callable[..., Activity], Mark]] = []
        self._moves: list[tuple[Callable[..., RecordedMove], Mark, Mark]] = []
        self._latest: dict[tuple[Operation, str], int] = {}
        self._turned = False  # after the turn to backward; with stages, also turned back
        self._pass: Callable[..., Activity] | None = None
        self._doing: Callable[..., Activity] = partial(Activity, "overhead", ROOT)  # not a wait

    def begin(self) -> float:
        """Begin a step with a meeting: all ranks leave together and start their clocks."""
        _, met = self._comm.exchange(torch.zeros(1, device=self._comm.device), "meeting of ranks")
        met.wait()
        self._begun = self._clock.start()
        self._activities.append((self._doing, lambda: 0.0))
        return self._begun

    def computes(self, kind: Work, unit: str) -> None:
        super().computes(kind, unit)
        self._turned = kind in ("head", "backward")
        part = self._worker.state_share if kind == "optimizer" else self._worker.samples
        if part:
            self._set_activity(self._pass or partial(Activity, kind, unit))

    def passes(self, action: Action) -> None:
        self._turned = action.kind != "forward"
        self._pass = partial(Activity, action.kind, stage_name(action.stage), batch=action.batch)
        self._set_activity(self._pass)

    def waits(self, operation: Operation, unit: str) -> None:
        move = self._latest.get((operation, unit))
        if move is not None:  # None: a single rank, or a unit without parameters
            self._append_activity(partial(Activity, "waiting", unit, move=move))

    def meets(self, whom: Meeting) -> None:
        self._append_activity(partial(Activity, whom, ROOT))

    def goes_on(self) -> None:
        self._append_activity(self._doing)

    def overhead(self) -> None:
        self._pass = None
        self._set_activity(partial(Activity, "overhead", ROOT))

    def issued(self, operation: Operation, unit: str, parts: Sequence[PendingWork]) -> None:
        works = [work for part in parts for work in part.works]
        if works:
            again = operation == "gather" and self._turned
            name = f"{operation} {unit} of {parts[0].comm.members}"
            moved = partial(RecordedMove, "regather" if again else operation, unit, name=name)
            self._note(moved, (operation, unit), works)

    def passed_on(
        self, operation: Operation, action: Action, name: str, message: PendingWork
    ) -> None:
        unit, known = stage_name(action.stage), f"{name} of {message.comm.members}"
        moved = partial(RecordedMove, operation, unit, name=known, batch=action.batch)
        self._note(moved, (operation, name), message.works)

    def end(self) -> float:
        super().end()
        ended = self._clock.stop()
        step_s = ended - self._begun
        self._activities.append((partial(Activity, "overhead", ROOT), lambda: step_s))
        return ended

    def recording(self) -> RecordedStep:
        """Return the recording of the finished step."""
        return RecordedStep(
            tuple(
                activity(start_s=begun(), end_s=ended())
                for (activity, begun), (_, ended) in pairwise(self._activities)
            ),
            tuple(
                moved(issued_s=issued(), ended_s=ended()) for moved, issued, ended in self._moves
            ),
        )

    def _note(
        self,
        moved: Callable[..., RecordedMove],
        key: tuple[Operation, str],
        works: Sequence[dist.Work],
    ) -> None:
        self._latest[key] = len(self._moves)
        self._moves.append((moved, self._clock.mark(), self._clock.end_of(works)))

    def _set_activity(self, activity: Callable[..., Activity]) -> None:
        """Set the activity from here on, and after waits."""
        self._doing = activity
        self._append_activity(activity)

    def _append_activity(self, activity: Callable[..., Activity]) -> None:
        if activity is not self._activities[-1][0]:
            self._activities.append((activity, self._clock.mark()))


class _HostClock:
    """Clock of the host, for a CPU device. Threads of the backend report the ends of collectives as
    soon as Python lets them run, possibly some milliseconds late."""

    def __init__(self) -> None:
        self._zero = 0.0

    def start(self) -> float:
        self._zero = time.perf_counter()
        return self._zero

    def mark(self) -> Mark:
        passed = time.perf_counter() - self._zero
        return lambda: passed

    def end_of(self, works: Sequence[dist.Work]) -> Mark:
        ends: list[Future[float]] = [Future() for _ in works]
        for work, end in zip(works, ends):
            work.get_future().add_done_callback(partial(self._tell, end))
        return lambda: max(end.result() for end in ends)

    def _tell(self, end: Future[float], _: object) -> None:
        try:
            end.set_result(time.perf_counter() - self._zero)
        except Exception as error:  # of a clock that a program replaced: told, not waited for
            end.set_exception(error)

    def stop(self) -> float:
        return time.perf_counter()


class _StreamClock:
    """Clock of events on the device's streams. Each collective is awaited on a side stream of its
    own: messages do not end in the order of issue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = runtime.new_event(device, timing=True)

    def start(self) -> float:
        runtime.synchronize(self._device)
        self._zero.record(runtime.current_stream(self._device))
        return time.perf_counter()

    def mark(self) -> Mark:
        event = runtime.record_event(self._device, timing=True)
        return lambda: self._zero.elapsed_time(event) / 1e3

    def end_of(self, works: Sequence[dist.Work]) -> Mark:
        # The engine keeps the buffers until its own wait, so waiting here frees none.
        with runtime.on_stream(runtime.new_stream(self._device)):
            for work in works:
                work.wait()
            return self.mark()

    def stop(self) -> float:
        runtime.synchronize(self._device)
        return time.perf_counter()
