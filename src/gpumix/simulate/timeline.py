"""What binds a step, and what each rank waits for.

The critical path is the chain of events, each of which let the next one start, that ends with the
last event of the step: shorten none of them, and the step stays as long as it is. A rank idles
while it computes nothing; each such moment has one cause.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import get_args

from gpumix.simulate.events import Event, Replay
from gpumix.simulate.program import Lane
from gpumix.spec.trace import CAUSES, Cause, Work, cause_of

COMPUTING: tuple[Work, ...] = get_args(Work)


@dataclass(frozen=True)
class Idle:
    """Why the ranks of a lane compute nothing from `start` to `end`."""

    lane: int
    start: float
    end: float
    cause: Cause


@dataclass(frozen=True)
class Use:
    """How a lane's ranks spend a step: seconds by cause of idling, and busy for the rest of it."""

    lane: Lane
    busy_s: float
    idle_s: dict[Cause, float]


@dataclass(frozen=True)
class Stretch:
    """The events of one kind and lane on the critical path; `first` to `last` are units."""

    kind: str
    lane: int | None
    events: int
    seconds: float
    first: str
    last: str


def critical_path(replay: Replay) -> tuple[Event, ...]:
    """The events that bind the end of the step, from its start; each begins where the one before
    it ends. Of several that end last it is the one that ended first in the replay."""
    events = replay.events
    number = max(range(len(events)), key=lambda n: (events[n].end, -n), default=None)
    path = []
    while number is not None:
        path.append(events[number])
        number = events[number].cause
    return tuple(reversed(path))


def stretches(replay: Replay) -> tuple[Stretch, ...]:
    """The critical path, like events joined: all of one kind on one lane, by their first."""
    found: dict[tuple[str, int | None], list[Event]] = {}
    for event in critical_path(replay):
        found.setdefault((event.kind, event.lane), []).append(event)
    unit = replay.program.unit
    return tuple(
        Stretch(
            kind,
            lane,
            len(events),
            sum(e.seconds for e in events),
            unit(events[0].call),
            unit(events[-1].call),
        )
        for (kind, lane), events in found.items()
    )


def uses(replay: Replay) -> tuple[Use, ...]:
    """How each lane's ranks spend the step."""
    found = []
    for lane, waits in zip(replay.program.lanes, _waits(replay)):
        idle_s = dict.fromkeys(CAUSES, 0.0)
        for idle in waits.all():
            idle_s[idle.cause] += idle.end - idle.start
        found.append(Use(lane, sum(e.seconds for e in waits.computed), idle_s))
    return tuple(found)


def idle(replay: Replay) -> Iterator[Idle]:
    """All moments at which a lane's ranks compute nothing, in the order of lanes and time."""
    for waits in _waits(replay):
        yield from waits.all()


def _waits(replay: Replay) -> Iterator[_Waits]:
    """Of each lane."""
    own: list[list[Event]] = [[] for _ in replay.program.lanes]
    for event in replay.events:
        if event.lane is not None:
            own[event.lane].append(event)
    for number, events in enumerate(own):
        yield _Waits(replay, number, events)


class _Waits:
    """What the ranks of one lane wait for."""

    def __init__(self, replay: Replay, number: int, own: list[Event]) -> None:
        self._replay, self._number = replay, number
        self.computed = [event for event in own if event.kind in COMPUTING]
        self._copies = [event for event in own if event.kind not in COMPUTING]
        moved = [
            (*span, collective)
            for span, collective in zip(replay.moved, replay.program.collectives)
            if span[0] < span[1]
        ]
        self._moved = moved
        self._ends = [end for _, end, _ in moved]

    def all(self) -> Iterator[Idle]:
        """From the start of the step to its end."""
        replay, at = self._replay, self._replay.program.overhead_s
        if at > 0:
            yield Idle(self._number, 0.0, at, "overhead")
        tasks = replay.program.lanes[self._number].tasks
        computed = [task for task in tasks if task.seconds > 0]
        for task, event in zip(computed, self.computed, strict=True):
            needed_until = replay.moved[task.needs - 1][1] if task.needs else at
            yield from self._gap(at, event.start, needed_until)
            at = event.end
        needed_until = replay.moved[-1][1] if replay.moved else at
        yield from self._gap(at, replay.step_s, needed_until)

    def _gap(self, start: float, end: float, needed_until: float) -> Iterator[Idle]:
        """A time without computing, cut where the cause may change. Collectives are waited for
        until `needed_until`."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        moved = list(takewhile(lambda span: span[0] < end, self._moved[first:]))
        copies = [e for e in self._copies if e.end > start and e.start < end]
        borders = {start, end, needed_until}
        borders |= {time for begun, ended, _ in moved for time in (begun, ended)}
        borders |= {time for copy in copies for time in (copy.start, copy.end)}
        for a, b in pairwise(sorted(time for time in borders if start <= time <= end)):
            running = next((c for begun, ended, c in moved if begun <= a < ended), None)
            if running is not None and a < needed_until:
                cause = cause_of(running.kind, exposed=running.exposed)
                yield Idle(self._number, a, b, cause)
            elif any(copy.start <= a < copy.end for copy in copies):
                yield Idle(self._number, a, b, "host copies")
            else:
                yield Idle(self._number, a, b, "slower rank")
