"""What a rank does in one step, and when, noted as the engine goes.

`SILENT` notes nothing; it is what every communicator has but in a step that is traced. Times are
the device's: on CUDA events on its streams, which are read when the step is over, so that nothing
waits for them. `train.trace` puts the recordings of all ranks together.

With one stage what is noted is units; with several, passes of micro-batches through a stage, as a
schedule has them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from gpumix.cost.pipeline import Action
from gpumix.engine import stands
from gpumix.hardware import runtime
from gpumix.spec.profile import ROOT
from gpumix.spec.stage import Worker
from gpumix.spec.trace import Move, Work, stage_name

if TYPE_CHECKING:
    from gpumix.engine.comm import Communicator, Pending

Operation = Literal["gather", "reduce", "send", "receive"]
Meeting = Literal["team", "other stage", "slower rank"]
# Seconds since the step began, which may be asked for when it is over.
Mark = Callable[[], float]


@dataclass(frozen=True)
class Activity:
    """A time in which a rank computes, or waits for the collective of number `move`, or for others
    in a meeting, or neither. Of a pass through a stage, `batch` is the number of the micro-batch,
    or of the wave."""

    kind: Literal[Work, Meeting, "waiting", "overhead"]
    unit: str
    start_s: float
    end_s: float
    move: int = -1
    batch: int | None = None


@dataclass(frozen=True)
class Moved:
    """A collective, or a message, from the moment at which this rank had issued it to its end on
    this rank. All who take part in it know it by the same `name`, and in the same order those that
    have one name."""

    kind: Literal[Move, "receive"]
    unit: str
    issued_s: float
    ended_s: float
    name: str = ""
    batch: int | None = None


@dataclass(frozen=True)
class Recording:
    """One step of one rank: activities without a gap between them, collectives in their order."""

    activities: tuple[Activity, ...]
    moves: tuple[Moved, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Recording:
        told = json.loads(text)
        return cls(
            tuple(Activity(**activity) for activity in told["activities"]),
            tuple(Moved(**move) for move in told["moves"]),
        )


class Record:
    """What a step tells of itself; this one notes nothing, but says where the rank stands."""

    def begin(self) -> float:
        """The step begins; a reading of the host's clock."""
        return time.perf_counter()

    def computes(self, kind: Work, unit: str) -> None:
        """From here on this is computed."""
        stands.computes(kind, unit if unit != ROOT else "")

    def passes(self, action: Action) -> None:
        """From here on, but for waits, it is all a part of this pass."""

    def waits(self, operation: Operation, unit: str) -> None:
        """From here on this collective, or message, is waited for."""

    def meets(self, whom: Meeting) -> None:
        """From here on others are waited for, with whom there is no collective of a unit."""

    def goes_on(self) -> None:
        """The wait is over: what was done before it is done again."""

    def overhead(self) -> None:
        """From here on neither."""

    def issued(self, operation: Operation, unit: str, parts: Sequence[Pending]) -> None:
        """A collective was issued, in so many parts."""

    def passed_on(self, operation: Operation, action: Action, name: str, message: Pending) -> None:
        """A message was issued, with what comes out of a pass; `name` is its own."""

    def end(self) -> float:
        """The step is over; a reading of the host's clock."""
        stands.computes()
        return time.perf_counter()


SILENT = Record()


class Recorder(Record):
    """Notes one step of a rank of `comm`, which is `worker` in the plan."""

    def __init__(self, comm: Communicator, worker: Worker) -> None:
        self._comm = comm
        self._worker = worker
        self._clock = _StreamClock(comm.device) if runtime.is_gpu(comm.device) else _HostClock()
        self._begun = 0.0
        self._activities: list[tuple[Callable[..., Activity], Mark]] = []
        self._moves: list[tuple[Callable[..., Moved], Mark, Mark]] = []
        self._latest: dict[tuple[Operation, str], int] = {}
        self._turned = False  # from a forward pass to a backward pass, and back in stages
        self._pass: Callable[..., Activity] | None = None
        self._doing: Callable[..., Activity] = partial(
            Activity, "overhead", ROOT
        )  # what is no wait

    def begin(self) -> float:
        """All ranks leave a meeting at the same time: their clocks start there."""
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
            self._does(self._pass or partial(Activity, kind, unit))

    def passes(self, action: Action) -> None:
        self._turned = action.kind != "forward"
        self._pass = partial(Activity, action.kind, stage_name(action.stage), batch=action.batch)
        self._does(self._pass)

    def waits(self, operation: Operation, unit: str) -> None:
        move = self._latest.get((operation, unit))
        if move is not None:  # None: a rank alone, or a unit without parameters of its own
            self._from_here(partial(Activity, "waiting", unit, move=move))

    def meets(self, whom: Meeting) -> None:
        self._from_here(partial(Activity, whom, ROOT))

    def goes_on(self) -> None:
        self._from_here(self._doing)

    def overhead(self) -> None:
        self._pass = None
        self._does(partial(Activity, "overhead", ROOT))

    def issued(self, operation: Operation, unit: str, parts: Sequence[Pending]) -> None:
        works = [work for part in parts for work in part.works]
        if works:
            again = operation == "gather" and self._turned
            name = f"{operation} {unit} of {parts[0].comm.members}"
            moved = partial(Moved, "regather" if again else operation, unit, name=name)
            self._note(moved, (operation, unit), works)

    def passed_on(self, operation: Operation, action: Action, name: str, message: Pending) -> None:
        unit, known = stage_name(action.stage), f"{name} of {message.comm.members}"
        moved = partial(Moved, operation, unit, name=known, batch=action.batch)
        self._note(moved, (operation, name), message.works)

    def end(self) -> float:
        super().end()
        ended = self._clock.stop()
        step_s = ended - self._begun
        self._activities.append((partial(Activity, "overhead", ROOT), lambda: step_s))
        return ended

    def recording(self) -> Recording:
        """The step, once it is over."""
        return Recording(
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
        moved: Callable[..., Moved],
        key: tuple[Operation, str],
        works: Sequence[dist.Work],
    ) -> None:
        self._latest[key] = len(self._moves)
        self._moves.append((moved, self._clock.mark(), self._clock.end_of(works)))

    def _does(self, activity: Callable[..., Activity]) -> None:
        """What is done from here on, and after waits."""
        self._doing = activity
        self._from_here(activity)

    def _from_here(self, activity: Callable[..., Activity]) -> None:
        if activity is not self._activities[-1][0]:
            self._activities.append((activity, self._clock.mark()))


class _HostClock:
    """The host's clock is the device's. Threads of the backend tell the ends of collectives, as
    soon as Python lets them run, which may be some milliseconds late."""

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
        end.set_result(time.perf_counter() - self._zero)

    def stop(self) -> float:
        return time.perf_counter()


class _StreamClock:
    """Events on the device's streams. Those beside the current one wait for collectives, each for
    its own: messages do not end in the order in which they are issued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = runtime.new_event(device, timing=True)

    def start(self) -> float:
        runtime.synchronize(self._device)
        self._zero.record(runtime.current_stream(self._device))
        return time.perf_counter()

    def mark(self) -> Mark:
        event = runtime.recorded_event(self._device, timing=True)
        return lambda: self._zero.elapsed_time(event) / 1e3

    def end_of(self, works: Sequence[dist.Work]) -> Mark:
        # The engine keeps the buffers until it has waited itself, so that to wait here frees none.
        with runtime.on_stream(runtime.new_stream(self._device)):
            for work in works:
                work.wait()
            return self.mark()

    def stop(self) -> float:
        runtime.synchronize(self._device)
        return time.perf_counter()
