"""Critical path of a step, and waiting times of each rank.

The critical path is the chain of events, each of which let the next one start, that ends with the
last event of the step: unless one of them is shortened, the step stays as long as it is. A rank
idles while it computes nothing; each such moment has one cause.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumix.schema.plan.step_trace import CAUSES, Cause
from gpumix.simulate.replay import COMPUTE_KINDS, EqualRanks, Event, Replay


@dataclass(frozen=True)
class LaneUtilization:
    """Use of a step's time by the ranks of a lane: idle seconds by cause, and busy for the rest."""

    lane: EqualRanks
    busy_s: float
    idle_s: dict[Cause, float]


@dataclass(frozen=True)
class CriticalPathSegment:
    """The events of one kind and lane on the critical path; `first` to `last` are units."""

    kind: str
    lane: int | None
    events: int
    seconds: float
    first: str
    last: str


def find_critical_path(replay: Replay) -> tuple[Event, ...]:
    """Return the events that determine the end of the step, in order; each begins where the
    previous event ends. Among the last to end, the first recorded counts."""
    events = replay.events
    number = max(range(len(events)), key=lambda n: (events[n].end, -n), default=None)
    path = []
    while number is not None:
        path.append(events[number])
        number = events[number].cause
    return tuple(reversed(path))


def list_critical_segments(replay: Replay) -> tuple[CriticalPathSegment, ...]:
    """Return the critical path with events joined by kind and lane, ordered by first event."""
    found: dict[tuple[str, int | None], list[Event]] = {}
    for event in find_critical_path(replay):
        found.setdefault((event.kind, event.lane), []).append(event)
    unit = replay.unit
    return tuple(
        CriticalPathSegment(
            kind,
            lane,
            len(events),
            sum(e.seconds for e in events),
            unit(events[0].call),
            unit(events[-1].call),
        )
        for (kind, lane), events in found.items()
    )


def compute_utilization(replay: Replay) -> tuple[LaneUtilization, ...]:
    """Return the use of the step's time by each lane."""
    busy_s = [0.0] * len(replay.lanes)
    for event in replay.events:
        if event.lane is not None and event.kind in COMPUTE_KINDS:
            busy_s[event.lane] += event.seconds
    idle_s: list[dict[Cause, float]] = [dict.fromkeys(CAUSES, 0.0) for _ in replay.lanes]
    for idle in replay.idle:
        idle_s[idle.lane][idle.cause] += idle.end - idle.start
    return tuple(map(LaneUtilization, replay.lanes, busy_s, idle_s))
