"""In which order ranks take micro-batches through stages, and when they are done.

A stage's workers share its micro-batches, as many each as it is fast; each takes numbers that
follow one another. So every worker of a stage is busy for about the same time, and one with n
micro-batches takes 1 / n of it for each: orders follow from these counts alone, and all ranks find
the same. A rank that has several stages (interleaved) takes turns between them.

* `gpipe`: all forward passes, then all backward passes.
* `1f1b`: a backward pass as soon as there is one to run. No more micro-batches wait for their
  backward than come through the later stages meanwhile (Narayanan et al., PipeDream-Flush): for
  equal stages as many as there are stages from this one on.
* `eager-1f1b`: the same with nearly twice as many, so that messages have time to arrive (Zhuang et
  al. 2022, AlpaComm).
* `interleaved`: as `1f1b` where a rank has several stages; micro-batches go through them in groups
  of as many as there are ranks in a row (Narayanan et al. 2021, Megatron-LM).
* `zero-bubble`: the backward pass of weights, which nobody waits for, is put off to when a rank
  would wait otherwise; no more are put off than `1f1b` keeps (Qi et al., ZB-H1).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from math import ceil
from typing import Literal, NamedTuple, Self

from gpumix.spec.plan import Plan, Schedule

Kind = Literal["forward", "backward", "weights"]


class Action(NamedTuple):
    """A stage's part of one micro-batch, or of one wave of them, in one pass. With a schedule that
    has `weights`, its `backward` is that of activations alone."""

    kind: Kind
    stage: int
    batch: int


@dataclass(frozen=True)
class Seat:
    """A worker of a stage, and the numbers of its micro-batches: some that follow one another. A
    team, or all workers where they go through all waves together, is known by its first `rank`."""

    stage: int
    rank: int
    batches: range


@dataclass(frozen=True)
class Pipeline:
    """Who is to run which micro-batches.

    Args:
        seats: of each stage, its workers in the order of their micro-batches.
        waves: of each stage, the wave of each micro-batch; () where batches are micro-batches.
    """

    schedule: Schedule
    seats: tuple[tuple[Seat, ...], ...]
    waves: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """That of a plan. From ZeRO stage 2 on, where a stage's workers gather and reduce for each
        other, its batches are waves."""
        together = plan.in_waves
        stages = range(len(plan.stages))
        return cls(
            plan.schedule,
            tuple(
                (Seat(n, plan.ranks_of(n)[0], range(plan.waves)),) if together else _seats(plan, n)
                for n in stages
            ),
            tuple(tuple(one.wave for one in s.micro_batches(plan.waves)) for s in plan.stages)
            if together
            else (),
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(sorted({seat.rank for seats in self.seats for seat in seats}))

    @cached_property
    def turns(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """By (stage, rank): its micro-batches in the order in which it takes them.

        All take them as the workers of the stage with the most of these come to them, each by its
        numbers: so none of those waits until others are through, and what two workers send each
        other is in the same order for both. Where a rank has several stages, all take them by their
        numbers, or they might wait for each other.
        """
        key: dict[int, float] = {}
        if not self._goes_round:
            widest = max(reversed(self.seats), key=len)
            for seat in widest:
                count = len(seat.batches)
                key |= {batch: (n + 0.5) / count for n, batch in enumerate(seat.batches)}
        return {
            (seat.stage, seat.rank): tuple(
                sorted(seat.batches, key=lambda batch: (key.get(batch, 0.0), batch))
            )
            for seats in self.seats
            for seat in seats
        }

    @cached_property
    def seat_of(self) -> dict[tuple[int, int], Seat]:
        """The worker by (stage, micro-batch)."""
        return {
            (seat.stage, batch): seat
            for seats in self.seats
            for seat in seats
            for batch in seat.batches
        }

    @cached_property
    def in_flight(self) -> dict[int, int]:
        """By rank: the most of its forward passes that may wait for their backward, stages of the
        same rank counted together."""
        if self.schedule == "gpipe":
            return {rank: sum(map(len, self._batches(rank))) for rank in self.ranks}
        if self._goes_round:
            return {rank: self._interleaved_in_flight(rank) for rank in self.ranks}
        turnaround: dict[int, float] = {}  # of a micro-batch: busy time of this and later stages
        limits: dict[int, int] = {}
        following: dict[int, float] = {}
        for seats in reversed(self.seats):
            here: dict[int, float] = {}
            shares: dict[int, float] = {}
            for seat in filter(lambda seat: seat.batches, seats):
                count = len(seat.batches)
                here |= {b: 1.0 / count + turnaround.get(b, 0.0) for b in seat.batches}
                longest = max(here[b] for b in seat.batches) * count
                # Each of those that come after it has one to go on with beside those it holds.
                feeding = sum(following.get(b, 0.0) for b in seat.batches)
                limits[seat.rank] = min(count, ceil(max(longest, feeding) - 1e-9))
                shares |= dict.fromkeys(seat.batches, (limits[seat.rank] + 1) / count)
            turnaround, following = here, shares
        if self.schedule == "eager-1f1b":
            return {rank: 2 * most - 1 for rank, most in limits.items()}
        return limits

    def _interleaved_in_flight(self, rank: int) -> int:
        """As Megatron-LM counts: of `v` stages on each of `p` ranks in a row, the one at place `r`
        runs 2 (p - r - 1) + (v - 1) p forward passes before it alternates."""
        stages = self._stages_of(rank)
        in_row = len(self.seats) // len(stages)
        warm_up = 2 * (in_row - stages[0] - 1) + (len(stages) - 1) * in_row
        return min(warm_up + 1, sum(map(len, self._batches(rank))))

    @cached_property
    def _goes_round(self) -> bool:
        """Whether ranks have several stages."""
        return any(len(self._stages_of(rank)) > 1 for rank in self.ranks)

    @cached_property
    def _all_alike(self) -> bool:
        """Whether all ranks have as many micro-batches of each stage, the same in each wave."""
        counts = {len(seat.batches) for seats in self.seats for seat in seats}
        return len(counts) == 1 and len(set(self.waves)) <= 1

    def _stages_of(self, rank: int) -> list[int]:
        return [n for n, seats in enumerate(self.seats) if any(s.rank == rank for s in seats)]

    def _batches(self, rank: int) -> Iterator[tuple[int, ...]]:
        return (order for (_, of), order in self.turns.items() if of == rank)

    def forwards(self, rank: int) -> list[Action]:
        """All forward passes of a rank, in order."""
        return self._in_groups("forward", rank, self._stages_of(rank))

    def backwards(self, rank: int) -> list[Action]:
        """All backward passes of a rank, in order."""
        return self._in_groups("backward", rank, self._stages_of(rank)[::-1])

    def _in_groups(self, kind: Kind, rank: int, stages: Sequence[int]) -> list[Action]:
        orders = [self.turns[stage, rank] for stage in stages]
        most = max(map(len, orders))
        # With one stage there is nothing to take turns with; and groups of those that have fewer
        # would hold others that theirs wait for.
        takes_turns = len(stages) > 1 and self._all_alike
        size = len(self.seats) // len(stages) if takes_turns else max(1, most)
        return [
            Action(kind, stage, batch)
            for begin in range(0, most, size)
            for stage, order in zip(stages, orders)
            for batch in order[begin : begin + size]
        ]

    def needs(self, action: Action) -> Iterator[Action]:
        """What must be done before, beside what comes earlier on the same rank."""
        last = len(self.seats) - 1
        if action.kind == "forward" and action.stage > 0:
            yield from self._of_others("forward", action, action.stage - 1)
        if action.kind == "backward":
            yield Action("forward", action.stage, action.batch)
            if action.stage < last:
                yield from self._of_others("backward", action, action.stage + 1)
        if action.kind == "weights":
            yield Action("backward", action.stage, action.batch)

    def _of_others(self, kind: Kind, action: Action, stage: int) -> Iterator[Action]:
        """The passes of another stage that an action's micro-batches go through; workers who have
        unlike many divide them into waves in unlike ways."""
        if not self.waves:
            yield Action(kind, stage, action.batch)
            return
        for batch in self._met[action.stage, stage].get(action.batch, ()):
            yield Action(kind, stage, batch)

    @cached_property
    def _met(self) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
        """By two stages, one after the other: of each wave of the first, the second's waves with
        the same micro-batches."""
        found: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        for one, other in ((n + a, n + 1 - a) for n in range(len(self.waves) - 1) for a in (0, 1)):
            met: dict[int, dict[int, None]] = {}
            for here, there in zip(self.waves[one], self.waves[other], strict=True):
                met.setdefault(here, {})[there] = None
            found[one, other] = {here: tuple(there) for here, there in met.items()}
        return found

    @cached_property
    def orders(self) -> dict[int, tuple[Action, ...]]:
        """What each rank does in a step, in order.

        The textbook's limits are for as many micro-batches on each rank; where they keep ranks from
        going on, more may wait for their backward.
        """
        for more in range(sum(len(seat.batches) for seats in self.seats for seat in seats) + 1):
            found = _Trial(self, more).run()
            if found is not None:
                return found
        raise AssertionError("ranks wait for each other, however much may wait")

    def actions_of(self, plan: Plan, rank: int) -> tuple[Action, ...]:
        """What a rank does in a step of the plan whose pipeline this is."""
        stage = plan.stages_of(rank)[0]
        leader = plan.team_of(rank, stage)[0]
        return self.orders[self.seats[stage][0].rank if plan.in_waves else leader]


def _seats(plan: Plan, stage: int) -> tuple[Seat, ...]:
    counts = [len(leader.micro_batches) for leader in plan.stages[stage].leaders]
    ends = list(accumulate(counts))
    return tuple(
        Seat(stage, team[0], range(end - count, end))
        for team, count, end in zip(plan.teams_of(stage), counts, ends)
    )


Seconds = Callable[[Action], float]


@dataclass(frozen=True)
class Transfer:
    """What one rank sends another: it takes so long, and one at a time goes `over` a link."""

    seconds: float
    over: Hashable = None


NOTHING_SENT = Transfer(0.0)


@dataclass(frozen=True)
class Times:
    """When each action and each transfer begins and ends, in seconds from the beginning of the
    step. A transfer is named by the action that it comes from and the one that it is for."""

    begin_s: Mapping[Action, float]
    end_s: Mapping[Action, float]
    sent_s: Mapping[tuple[Action, Action], tuple[float, float]]

    @property
    def step_s(self) -> float:
        return max(self.end_s.values(), default=0.0)


def replay(
    orders: Mapping[int, Sequence[Action]],
    needs: Callable[[Action], Iterable[Action]],
    seconds: Seconds,
    transfer: Callable[[Action, Action], Transfer],
    earliest_s: Seconds = lambda action: 0.0,
) -> Times:
    """When ranks that each keep to their order are done.

    Args:
        needs: what must be done before an action, beside what comes earlier on the same rank.
        seconds: that an action takes.
        transfer: from the end of an action until what it sends is there for another one.
        earliest_s: no action ends before.

    Raises:
        ValueError: two ranks wait for each other.
    """
    return _Replay(orders, needs, seconds, transfer, earliest_s).run()


class _Replay:
    """Events in the order of time: an action ends, or what it has sent arrives."""

    def __init__(
        self,
        orders: Mapping[int, Sequence[Action]],
        needs: Callable[[Action], Iterable[Action]],
        seconds: Seconds,
        transfer: Callable[[Action, Action], Transfer],
        earliest_s: Seconds,
    ) -> None:
        self._orders = orders
        self._seconds = seconds
        self._earliest_s = earliest_s
        self._transfer = transfer
        self._rank_of = {action: rank for rank, order in orders.items() for action in order}
        self._needs = {action: set(needs(action)) for action in self._rank_of}
        self._wanted: dict[Action, list[Action]] = {}
        for action, earlier in self._needs.items():
            for one in earlier:
                self._wanted.setdefault(one, []).append(action)
        self._begin: dict[Action, float] = {}
        self._end: dict[Action, float] = {}
        self._sent: dict[tuple[Action, Action], tuple[float, float]] = {}
        self._busy: dict[Hashable, float] = {}  # links, until when
        self._at = dict.fromkeys(orders, 0)
        self._running: set[int] = set()
        self._events: list[tuple[float, int, Action, Action | None]] = []
        self._pushed = 0

    def run(self) -> Times:
        for rank in self._orders:
            self._start(rank, 0.0)
        while self._events:
            now, _, action, there = heapq.heappop(self._events)
            if there is None:
                self._ended(action, now)
            else:
                self._needs[there].discard(action)
                self._start(self._rank_of[there], now)
        for rank, order in self._orders.items():
            if self._at[rank] < len(order):
                missing = min(self._needs[order[self._at[rank]]])
                raise ValueError(f"rank {rank} waits for {missing}, which never comes")
        return Times(self._begin, self._end, self._sent)

    def _start(self, rank: int, now: float) -> None:
        """The rank's next action, if it has all that it needs."""
        order, at = self._orders[rank], self._at[rank]
        if rank in self._running or at == len(order) or self._needs[order[at]]:
            return
        self._running.add(rank)
        action = order[at]
        self._begin[action] = now
        self._push(max(now + self._seconds(action), self._earliest_s(action)), action, None)

    def _ended(self, action: Action, now: float) -> None:
        rank = self._rank_of[action]
        self._end[action] = now
        self._running.discard(rank)
        self._at[rank] += 1
        for other in self._wanted.get(action, ()):
            sent = self._transfer(action, other)
            begin = now
            if sent.over is not None:
                begin = max(now, self._busy.get(sent.over, 0.0))
                self._busy[sent.over] = begin + sent.seconds
            if self._rank_of[other] != rank:
                self._sent[action, other] = begin, begin + sent.seconds
            self._push(begin + sent.seconds, action, other)
        self._start(rank, now)

    def _push(self, time: float, action: Action, there: Action | None) -> None:
        self._pushed += 1  # events of one moment come as they were found
        heapq.heappush(self._events, (time, self._pushed, action, there))


@dataclass
class _Trial:
    """A step in which every worker of a stage is busy for the same time: what each does next is
    what there is to do then."""

    pipeline: Pipeline
    more: int = 0  # forward passes that may wait for their backward, beside `Pipeline.in_flight`
    _done: dict[Action, float] = field(default_factory=dict)

    def run(self) -> dict[int, tuple[Action, ...]] | None:
        """What each rank did; None if they came to wait for each other."""
        pipeline = self.pipeline
        ranks = {rank: _Rank(pipeline, rank, self.more) for rank in pipeline.ranks}
        wakes = [(0.0, rank) for rank in ranks]
        heapq.heapify(wakes)
        while wakes:
            now, rank = heapq.heappop(wakes)
            one = ranks[rank]
            if now < one.free:
                continue
            action = one.choose(partial(self._ready, now))
            if action is None:
                continue
            one.free = now + self._seconds(action)
            self._done[action] = one.free
            # The rank itself, and whoever waits for this.
            for other in {rank, *self._after(action)}:
                heapq.heappush(wakes, (one.free, other))
        if not all(one.finished for one in ranks.values()):
            return None
        return {rank: tuple(one.order) for rank, one in ranks.items()}

    def _ready(self, now: float, action: Action) -> bool:
        return all(self._done.get(one, float("inf")) <= now for one in self.pipeline.needs(action))

    def _after(self, action: Action) -> Iterator[int]:
        """Ranks that may wait for the end of `action`."""
        step = 1 if action.kind == "forward" else -1
        seat = self.pipeline.seat_of.get((action.stage + step, action.batch))
        if seat is not None:
            yield seat.rank

    def _seconds(self, action: Action) -> float:
        """A forward takes half of a backward, a backward of activations alone as long as it."""
        seat = self.pipeline.seat_of[action.stage, action.batch]
        whole = action.kind == "backward" and self.pipeline.schedule != "zero-bubble"
        return (2.0 if whole else 1.0) / len(seat.batches)


class _Rank:
    """What a rank has done, and has yet to do."""

    def __init__(self, pipeline: Pipeline, rank: int, more: int) -> None:
        self.order: list[Action] = []
        self.free = 0.0
        self._forwards = pipeline.forwards(rank)[::-1]
        self._backwards = pipeline.backwards(rank)[::-1]
        self._weights: list[Action] = []
        self._splits = pipeline.schedule == "zero-bubble"
        self._all_first = pipeline.schedule == "gpipe"
        self._room = pipeline.in_flight.get(rank, 0) + more
        self._put_off = 0
        self._most_put_off = max(pipeline.in_flight.values()) + more

    @property
    def finished(self) -> bool:
        return not (self._forwards or self._backwards or self._weights)

    def choose(self, ready: Callable[[Action], bool]) -> Action | None:
        """The next action, if there is one that need not wait."""
        action = self._next(ready)
        if action is not None:
            self.order.append(action)
        return action

    def _next(self, ready: Callable[[Action], bool]) -> Action | None:
        may = self._room > 0 and self._put_off < self._most_put_off
        if self._forwards and may and ready(self._forwards[-1]):
            self._room -= 1
            self._put_off += 1
            return self._forwards.pop()
        waits = self._all_first and self._forwards
        if self._backwards and not waits and ready(self._backwards[-1]):
            action = self._backwards.pop()
            self._room += 1
            if self._splits:
                self._weights.insert(0, Action("weights", action.stage, action.batch))
            else:
                self._put_off -= 1
            return action
        if self._weights:
            self._put_off -= 1
            return self._weights.pop()
        return None
