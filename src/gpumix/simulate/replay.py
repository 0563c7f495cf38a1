"""One step of a plan as it was replayed: what every rank does when, and why it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpumix.cost.buckets import AFTER, BEFORE
from gpumix.spec import trace
from gpumix.spec.profile import ROOT
from gpumix.spec.stage import Worker
from gpumix.spec.trace import Cause

# In the place of a unit's number: the root unit, and what is used at one of its ends only.
OUTSIDE, FRONT, BACK = -1, -2, -3
ROOTS = {OUTSIDE: ROOT, FRONT: BEFORE, BACK: AFTER}

Kind = Literal[trace.Kind, "overhead"]
COMPUTING: tuple[trace.Work, ...] = get_args(trace.Work)


@dataclass(frozen=True)
class Event:
    """Something that took time.

    `lane` says which ranks did it, those of one lane; None is all. `cause` is the number of the
    event whose end let it start; None for the first.
    """

    kind: Kind
    call: int
    lane: int | None
    start: float
    end: float
    cause: int | None
    micro_batches: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Idle:
    """Why the ranks of a lane compute nothing from `start` to `end`."""

    lane: int
    start: float
    end: float
    cause: Cause


@dataclass(frozen=True)
class Alike:
    """Ranks that are alike, and one of their workers."""

    ranks: tuple[int, ...]
    worker: Worker


@dataclass(frozen=True)
class Replay:
    """One step: all events in the order in which they ended, and all moments at which the ranks of
    a lane compute nothing.

    `units` are the names that events have by number. `predicted_s` is what the closed form of
    `cost` says.
    """

    lanes: tuple[Alike, ...]
    units: tuple[str, ...]
    events: tuple[Event, ...]
    idle: tuple[Idle, ...]
    predicted_s: float

    @property
    def step_s(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def unit(self, number: int) -> str:
        """The name of a unit call, or of a stage, or of what of the root it is."""
        return ROOTS[number] if number < 0 else self.units[number]
