"""What binds a step, and what each rank waits for.

The critical path is the chain of events, each of which let the next one start, that ends with the
last event of the step: shorten none of them, and the step stays as long as it is. A rank idles
while it computes nothing; each such moment has one cause.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumix.simulate.replay import COMPUTING, Alike, Event, Replay
from gpumix.spec.trace import CAUSES, Cause


@dataclass(frozen=True)
class Use:
    """How a lane's ranks spend a step: seconds by cause of idling, and busy for the rest of it."""

    lane: Alike
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
    unit = replay.unit
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
    busy_s = [0.0] * len(replay.lanes)
    for event in replay.events:
        if event.lane is not None and event.kind in COMPUTING:
            busy_s[event.lane] += event.seconds
    idle_s: list[dict[Cause, float]] = [dict.fromkeys(CAUSES, 0.0) for _ in replay.lanes]
    for idle in replay.idle:
        idle_s[idle.lane][idle.cause] += idle.end - idle.start
    return tuple(map(Use, replay.lanes, busy_s, idle_s))
