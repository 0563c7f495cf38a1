"""A replayed step of a plan: the activity of every rank over time, and reasons for waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpumix.cost.network.buckets import AFTER, BEFORE
from gpumix.schema.plan import step_trace
from gpumix.schema.plan.stage import Worker
from gpumix.schema.plan.step_trace import Cause
from gpumix.schema.profile.profile import ROOT

# Instead of a unit's number: the root unit, and its parts used only at the front or the back.
ROOT_CALL, ROOT_BEFORE_CALL, ROOT_AFTER_CALL = -1, -2, -3
ROOT_BUCKETS = {ROOT_CALL: ROOT, ROOT_BEFORE_CALL: BEFORE, ROOT_AFTER_CALL: AFTER}

Kind = Literal[step_trace.Kind, "overhead"]
COMPUTE_KINDS: tuple[step_trace.Work, ...] = get_args(step_trace.Work)


@dataclass(frozen=True)
class Event:
    """An activity that took time.

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
    """An interval from `start` to `end` without computation on a lane's ranks, and its cause."""

    lane: int
    start: float
    end: float
    cause: Cause


@dataclass(frozen=True)
class EqualRanks:
    """Identical ranks, and one of their workers."""

    ranks: tuple[int, ...]
    worker: Worker


@dataclass(frozen=True)
class Replay:
    """A replayed step: all events, ordered by end, and all intervals in which the ranks of a lane
    compute nothing.

    `units` are the names of unit numbers in events. `predicted_s` is the step time by the closed
    form of `cost`.
    """

    lanes: tuple[EqualRanks, ...]
    units: tuple[str, ...]
    events: tuple[Event, ...]
    idle: tuple[Idle, ...]
    predicted_s: float

    @property
    def step_s(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def unit(self, number: int) -> str:
        """Return the name of a unit call, of a stage, or of a part of the root."""
        return ROOT_BUCKETS[number] if number < 0 else self.units[number]
