"""A step of a plan with several pipeline stages as events: passes, messages, reductions, updates.

The times are those of `cost.pipeline.staged_step`, whose replay of the schedule this shows. In a
wave, all ranks of a stage take the time of the slowest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from gpumix.cost.pipeline.staged_step import StagedStep
from gpumix.cost.pipeline_schedule import Action
from gpumix.cost.predict import check_plan_matches_profile
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import Cause, stage_name
from gpumix.schema.profile.profile import Profile
from gpumix.simulate.program import check_devices
from gpumix.simulate.replay import COMPUTE_KINDS, ROOT_CALL, EqualRanks, Event, Idle, Kind, Replay


def simulate_stages(profile: Profile, plan: Plan) -> Replay:
    """Simulate one step of a plan with several pipeline stages.

    Raises:
        InputError: as in `simulate.events`.
    """
    check_plan_matches_profile(profile, plan)
    check_devices(profile, plan)
    step = StagedStep(profile, plan)
    found = _Events(step)
    events = found.all()
    return Replay(
        lanes=tuple(EqualRanks((rank,), worker) for rank, worker in enumerate(step.plan.workers)),
        units=tuple(stage_name(number) for number in range(len(plan.stages))),
        events=events,
        idle=tuple(found.idle(events)),
        predicted_s=step.seconds,
    )


@dataclass(frozen=True)
class _NamedEvent:
    """An event with a unique name, and the names of its predecessors; the last to end let it
    start."""

    name: Hashable
    kind: Kind
    unit: int
    lane: int | None
    start: float
    end: float
    after: tuple[Hashable, ...] = ()
    batches: tuple[int, ...] = ()


OVERHEAD = "overhead"


class _Events:
    def __init__(self, step: StagedStep) -> None:
        self._step, self._plan = step, step.plan
        self._begin_s = step.profile.step_overhead_s
        self._noted: dict[Hashable, _NamedEvent] = {}

    def all(self) -> tuple[Event, ...]:
        """Return all events, ordered by end. An event without a duration is left out: as a cause,
        its predecessor replaces it."""
        self._note(_NamedEvent(OVERHEAD, "overhead", ROOT_CALL, None, -self._begin_s, 0.0))
        for rank in range(len(self._plan.workers)):
            for one in self._iterate_rank_events(rank):
                self._note(one)
        lasting = [one for one in self._noted.values() if one.end > one.start]
        lasting.sort(key=lambda one: (one.end, one.start))
        number = {one.name: place for place, one in enumerate(lasting)}
        return tuple(
            Event(
                one.kind,
                one.unit,
                one.lane,
                one.start + self._begin_s,
                one.end + self._begin_s,
                None if (cause := self._cause(one)) is None else number[cause],
                one.batches,
            )
            for one in lasting
        )

    def _note(self, one: _NamedEvent) -> None:
        self._noted[one.name] = one

    def _cause(self, one: _NamedEvent) -> Hashable | None:
        """Return the predecessor that ended last, which let the event start."""
        known = [self._noted[name] for name in one.after if name in self._noted]
        if not known:
            return OVERHEAD if one.name != OVERHEAD and self._begin_s > 0 else None
        last = max(known, key=lambda other: (other.end, other.start))
        return last.name if last.end > last.start else self._cause(last)

    def _iterate_rank_events(self, rank: int) -> Iterator[_NamedEvent]:
        before: Hashable = OVERHEAD
        for action in self._step.order(rank):
            yield from self._messages(action)
            begin, end = self._step.times.begin_s[action], self._step.times.end_s[action]
            name = (rank, action)
            sent = tuple(("send", one, action) for one in self._senders(action))
            batches = (action.batch,)
            yield _NamedEvent(
                name, action.kind, action.stage, rank, begin, end, (before, *sent), batches
            )
            before = name
        yield from self._end(rank)

    def _senders(self, action: Action) -> Iterator[Action]:
        for one in self._step.pipeline.needs(action):
            if (one, action) in self._step.times.sent_s:
                yield one

    def _messages(self, action: Action) -> Iterator[_NamedEvent]:
        """Yield the messages to `action`, once for all ranks of a wave."""
        for one in self._senders(action):
            begin, end = self._step.times.sent_s[one, action]
            name, giver = ("send", one, action), self._leader(one)
            if name not in self._noted:
                yield _NamedEvent(
                    name, "send", one.stage, giver, begin, end, ((giver, one),), (one.batch,)
                )

    def _leader(self, action: Action) -> int:
        return self._step.pipeline.assignment_of[action.stage, action.batch].rank

    def _end(self, rank: int) -> Iterator[_NamedEvent]:
        """Yield the reductions and the update of a rank."""
        last: Hashable = None
        at = 0.0
        for number in self._plan.stages_of(rank):
            ranks = self._plan.ranks_of(number)
            after: tuple[Hashable, ...] = tuple((r, self._last(r, number)) for r in ranks)
            for turn, reductions in enumerate(self._step.reductions):
                begin, end = reductions.of_stages[number]
                name = ("reduce", turn, number, rank)
                unit = ROOT_CALL if turn else number
                yield _NamedEvent(name, "reduce", unit, rank, begin, end, after)
                after = (name,)
                if end >= at:
                    last, at = name, end
        update = sum(
            self._step.stages[n].update_s(self._step.place_of[n, rank])
            for n in self._plan.stages_of(rank)
        )
        yield _NamedEvent(("update", rank), "optimizer", ROOT_CALL, rank, at, at + update, (last,))

    def _last(self, rank: int, stage: int) -> Action | None:
        of_stage = [action for action in self._step.order(rank) if action.stage == stage]
        return of_stage[-1] if of_stage else None

    def idle(self, events: tuple[Event, ...]) -> Iterator[Idle]:
        """Yield all intervals in which a rank computes nothing."""
        step_s = max((event.end for event in events), default=0.0)
        for rank in range(len(self._plan.workers)):
            own = [e for e in events if e.lane == rank]
            computed = sorted((e for e in own if e.kind in COMPUTE_KINDS), key=lambda e: e.start)
            coming = [
                (one.start + self._begin_s, one.end + self._begin_s)
                for one in self._noted.values()
                if one.kind == "send" and self._is_received_by(one, rank)
            ]
            reduced = [(e.start, e.end) for e in own if e.kind == "reduce"]
            if self._begin_s > 0:
                yield Idle(rank, 0.0, self._begin_s, "overhead")
            at = self._begin_s
            for event in computed:
                yield from _split_idle(rank, at, event.start, coming, reduced)
                at = max(at, event.end)
            yield from _split_idle(rank, at, step_s, coming, reduced)

    def _is_received_by(self, one: _NamedEvent, rank: int) -> bool:
        assert isinstance(one.name, tuple)
        action: Action = one.name[2]
        if self._step.in_waves:
            return rank in self._plan.ranks_of(action.stage)
        return self._leader(action) == rank


def _split_idle(
    rank: int,
    start: float,
    end: float,
    coming: list[tuple[float, float]],
    reduced: list[tuple[float, float]],
) -> Iterator[Idle]:
    """Yield an interval without computation, split where its cause changes."""
    if start >= end:
        return
    borders = {start, end}
    borders |= {t for span in (*coming, *reduced) for t in span if start < t < end}
    times = sorted(borders)
    for a, b in pairwise(times):
        cause: Cause = "other stage"
        if any(begin <= a < stop for begin, stop in reduced):
            cause = "reduction"
        elif any(begin <= a < stop for begin, stop in coming):
            cause = "message"
        yield Idle(rank, a, b, cause)
