"""Pipeline schedules: the order of micro-batches on each rank, and the replay of a step.

A stage's workers share its micro-batches in proportion to their speed; each takes consecutive
numbers. So all workers of a stage are busy for about the same time, and a worker with n
micro-batches spends 1 / n of it on each: orders follow from these counts alone, and all ranks
compute the same orders. A rank with several stages (interleaved) alternates between them.

* `gpipe`: all forward passes, then all backward passes.
* `1f1b`: a backward pass as soon as one is ready. No more micro-batches wait for their backward
  than pass through the later stages meanwhile (Narayanan et al., PipeDream-Flush): for equal
  stages, as many as there are stages from this one on.
* `eager-1f1b`: as `1f1b` with nearly twice as many, so that messages have time to arrive (Zhuang et
  al. 2022, AlpaComm).
* `interleaved`: as `1f1b` where a rank has several stages; micro-batches pass through the stages in
  groups as large as the number of ranks in a row (Narayanan et al. 2021, Megatron-LM).
* `zero-bubble`: the weights' backward pass, needed by no other rank, is deferred until a rank would
  otherwise wait; no more are deferred than `1f1b` keeps (Qi et al., ZB-H1).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from math import ceil
from typing import Literal, NamedTuple, Self, TypeVar

from gpumix.schema.plan.plan import Plan, Schedule

Kind = Literal["forward", "backward", "weights"]
S = TypeVar("S", bound="MicroBatchSchedule")


class Action(NamedTuple):
    """Part of a stage in one pass of one micro-batch, or of one wave of micro-batches. In a
    schedule with `weights`, `backward` computes gradients of activations only."""

    kind: Kind
    stage: int
    batch: int


@dataclass(frozen=True)
class StageAssignment:
    """Worker of a stage, and its consecutive micro-batch numbers. A tensor-parallel group, or all
    workers running waves together, is identified by its first `rank`."""

    stage: int
    rank: int
    batches: range


@dataclass(frozen=True)
class MicroBatchSchedule:
    """Assignment of micro-batches to workers.

    Args:
        seats: the workers of each stage, in the order of their micro-batches.
        waves: the wave of each micro-batch, by stage; () where batches are micro-batches.
    """

    schedule: Schedule
    seats: tuple[tuple[StageAssignment, ...], ...]
    waves: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the pipeline of a plan. From ZeRO stage 2 on, a stage's workers gather and reduce
        together, and its batches are waves."""
        together = plan.in_waves
        stages = range(len(plan.stages))
        seats = tuple(
            (StageAssignment(n, plan.ranks_of(n)[0], range(plan.waves)),)
            if together
            else _seats(plan, n)
            for n in stages
        )
        waves: tuple[tuple[int, ...], ...] = ()
        if together:
            waves = tuple(
                tuple(one.wave for one in stage.micro_batches(plan.waves)) for stage in plan.stages
            )
        shared: Self = _share(cls(plan.schedule, seats, waves))
        return shared

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in order."""
        return tuple(sorted({seat.rank for seats in self.seats for seat in seats}))

    @cached_property
    def turns(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Order of micro-batches by (stage, rank).

        All ranks use the order in which the workers of the stage with the most workers reach the
        micro-batches, each by number. So no worker of that stage waits until others are done, and
        the messages between two workers have one order on both sides. If a rank has several stages,
        all ranks use the order of numbers, or they might deadlock.
        """
        key: dict[int, float] = {}
        if not self._is_interleaved:
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
    def assignment_of(self) -> dict[tuple[int, int], StageAssignment]:
        """Worker by (stage, micro-batch)."""
        return {
            (seat.stage, batch): seat
            for seats in self.seats
            for seat in seats
            for batch in seat.batches
        }

    @cached_property
    def in_flight(self) -> dict[int, int]:
        """Limit of forward passes waiting for their backward, by rank, over all stages of the
        rank."""
        if self.schedule == "gpipe":
            return {rank: sum(map(len, self._batches(rank))) for rank in self.ranks}
        if self._is_interleaved:
            return {rank: self._interleaved_in_flight(rank) for rank in self.ranks}
        turnaround: dict[int, float] = {}  # busy time of this and later stages, by micro-batch
        limits: dict[int, int] = {}
        following: dict[int, float] = {}
        for seats in reversed(self.seats):
            here: dict[int, float] = {}
            shares: dict[int, float] = {}
            for seat in filter(lambda seat: seat.batches, seats):
                count = len(seat.batches)
                here |= {b: 1.0 / count + turnaround.get(b, 0.0) for b in seat.batches}
                longest = max(here[b] for b in seat.batches) * count
                # Each later worker has one more to continue with, in addition to its limit.
                feeding = sum(following.get(b, 0.0) for b in seat.batches)
                limits[seat.rank] = min(count, ceil(max(longest, feeding) - 1e-9))
                shares |= dict.fromkeys(seat.batches, (limits[seat.rank] + 1) / count)
            turnaround, following = here, shares
        if self.schedule == "eager-1f1b":
            return {rank: 2 * most - 1 for rank, most in limits.items()}
        return limits

    def _interleaved_in_flight(self, rank: int) -> int:
        """Return Megatron-LM's limit: with `v` stages on each of `p` ranks in a row, the rank at
        place `r` runs 2 (p - r - 1) + (v - 1) p forward passes before it alternates."""
        stages = self._stages_of(rank)
        in_row = len(self.seats) // len(stages)
        warm_up = 2 * (in_row - stages[0] - 1) + (len(stages) - 1) * in_row
        return min(warm_up + 1, sum(map(len, self._batches(rank))))

    @cached_property
    def _is_interleaved(self) -> bool:
        """Flag: ranks have several stages."""
        return any(len(self._stages_of(rank)) > 1 for rank in self.ranks)

    @cached_property
    def _has_equal_counts(self) -> bool:
        """Flag: all ranks have equally many micro-batches per stage, in equal waves."""
        counts = {len(seat.batches) for seats in self.seats for seat in seats}
        return len(counts) == 1 and len(set(self.waves)) <= 1

    def _stages_of(self, rank: int) -> list[int]:
        return [n for n, seats in enumerate(self.seats) if any(s.rank == rank for s in seats)]

    def _batches(self, rank: int) -> Iterator[tuple[int, ...]]:
        return (order for (_, of), order in self.turns.items() if of == rank)

    def forwards(self, rank: int) -> list[Action]:
        """Return all forward passes of a rank, in order."""
        return self._in_groups("forward", rank, self._stages_of(rank))

    def backwards(self, rank: int) -> list[Action]:
        """Return all backward passes of a rank, in order."""
        return self._in_groups("backward", rank, self._stages_of(rank)[::-1])

    def _in_groups(self, kind: Kind, rank: int, stages: Sequence[int]) -> list[Action]:
        orders = [self.turns[stage, rank] for stage in stages]
        most = max(map(len, orders))
        # A single stage needs no alternation. Groups of ranks with fewer micro-batches would
        # contain micro-batches that the groups of others wait for.
        takes_turns = len(stages) > 1 and self._has_equal_counts
        size = len(self.seats) // len(stages) if takes_turns else max(1, most)
        return [
            Action(kind, stage, batch)
            for begin in range(0, most, size)
            for stage, order in zip(stages, orders)
            for batch in order[begin : begin + size]
        ]

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the prerequisites of an action, except earlier actions on the rank."""
        found = self._needed.get(action)
        if found is None:
            found = self._needed[action] = self._find_needs(action)
        return found

    @cached_property
    def _needed(self) -> dict[Action, tuple[Action, ...]]:
        return {}

    def _find_needs(self, action: Action) -> tuple[Action, ...]:
        kind, stage, batch = action
        if kind == "weights":
            return (Action("backward", stage, batch),)
        if kind == "backward":
            own = Action("forward", stage, batch)
            if stage == len(self.seats) - 1:
                return (own,)
            return (own, *self._of_others("backward", action, stage + 1))
        return self._of_others("forward", action, stage - 1) if stage else ()

    def _of_others(self, kind: Kind, action: Action, stage: int) -> tuple[Action, ...]:
        """Return the passes of another stage with an action's micro-batches; workers with
        different counts divide micro-batches into different waves."""
        if not self.waves:
            return (Action(kind, stage, action.batch),)
        met = self._met[action.stage, stage].get(action.batch, ())
        return tuple(Action(kind, stage, batch) for batch in met)

    @cached_property
    def _met(self) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
        """Waves with common micro-batches, by pair of adjacent stages and wave of the first
        stage."""
        found: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        for one, other in ((n + a, n + 1 - a) for n in range(len(self.waves) - 1) for a in (0, 1)):
            met: dict[int, dict[int, None]] = {}
            for here, there in zip(self.waves[one], self.waves[other], strict=True):
                met.setdefault(here, {})[there] = None
            found[one, other] = {here: tuple(there) for here, there in met.items()}
        return found

    @cached_property
    def orders(self) -> dict[int, tuple[Action, ...]]:
        """Actions of each rank in a step, in order.

        Published limits assume equally many micro-batches on each rank. Where they lead to a
        deadlock, more micro-batches may wait for their backward.
        """
        for more in range(sum(len(seat.batches) for seats in self.seats for seat in seats) + 1):
            found = _ReadinessSimulation(self, more).run()
            if found is not None:
                return found
        raise AssertionError("ranks wait for each other, however much may wait")

    def actions_of(self, plan: Plan, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank in a step of the pipeline's plan."""
        stage = plan.stages_of(rank)[0]
        leader = plan.get_tp_group(rank, stage)[0]
        return self.orders[self.seats[stage][0].rank if plan.in_waves else leader]


@lru_cache(maxsize=16)
def _share(pipeline: S) -> S:
    """Return the same pipeline for equal ones: a search asks for the orders of few."""
    return pipeline


def _seats(plan: Plan, stage: int) -> tuple[StageAssignment, ...]:
    counts = [len(leader.micro_batches) for leader in plan.stages[stage].leaders]
    ends = list(accumulate(counts))
    return tuple(
        StageAssignment(stage, tp_group[0], range(end - count, end))
        for tp_group, count, end in zip(plan.list_tp_groups(stage), counts, ends)
    )


Seconds = Callable[[Action], float]


@dataclass(frozen=True)
class Transfer:
    """Message between two ranks: its seconds, and the link `over` which messages are serialized."""

    seconds: float
    over: Hashable = None


NO_TRANSFER = Transfer(0.0)


@dataclass(frozen=True)
class ActionTimes:
    """Begin and end of each action and transfer, in seconds from the beginning of the step. A
    transfer is named by its source action and the action waiting for it."""

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
) -> ActionTimes:
    """Replay a step of ranks running their actions in the given orders.

    Args:
        needs: the prerequisites of an action, except earlier actions on the rank.
        seconds: the duration of an action.
        transfer: the message between two actions, from the end of the first.
        earliest_s: a lower bound for the end of an action.

    Raises:
        ValueError: two ranks wait for each other.
    """
    return _Replay(orders, needs, seconds, transfer, earliest_s).run()


class _Replay:
    """Event queue in the order of time: an action ends, or its message arrives. Actions are
    numbered, which is quicker than looking them up."""

    def __init__(
        self,
        orders: Mapping[int, Sequence[Action]],
        needs: Callable[[Action], Iterable[Action]],
        seconds: Seconds,
        transfer: Callable[[Action, Action], Transfer],
        earliest_s: Seconds,
    ) -> None:
        self._seconds = seconds
        self._earliest_s = earliest_s
        self._transfer = transfer
        self._actions = [action for order in orders.values() for action in order]
        number = {action: n for n, action in enumerate(self._actions)}
        # By rank, the number of the next action, and the number behind the last.
        ends = list(accumulate(map(len, orders.values()), initial=0))
        self._next, self._ends = ends[:-1], ends[1:]
        self._rank_of = [rank for rank, order in enumerate(orders.values()) for _ in order]
        self._needs = [{number[one] for one in needs(action)} for action in self._actions]
        self._wanted: list[list[int]] = [[] for _ in self._actions]
        for n, earlier in enumerate(self._needs):
            for one in earlier:
                self._wanted[one].append(n)
        self._begin: dict[Action, float] = {}
        self._end: dict[Action, float] = {}
        self._sent: dict[tuple[Action, Action], tuple[float, float]] = {}
        self._busy: dict[Hashable, float] = {}  # links, until when
        self._running = [False] * len(orders)
        # Time, place among equal times, action, and the action told (-1: it ended).
        self._events: list[tuple[float, int, int, int]] = []
        self._pushed = 0

    def run(self) -> ActionTimes:
        for rank in range(len(self._next)):
            self._start(rank, 0.0)
        events, needs, rank_of = self._events, self._needs, self._rank_of
        while events:
            now, _, action, there = heapq.heappop(events)
            if there < 0:
                self._ended(action, now)
            else:
                needs[there].discard(action)
                self._start(rank_of[there], now)
        for at, end in zip(self._next, self._ends):
            if at < end:
                missing = min(self._actions[n] for n in needs[at])
                raise ValueError(f"{self._actions[at]} waits for {missing}, which never comes")
        return ActionTimes(self._begin, self._end, self._sent)

    def _start(self, rank: int, now: float) -> None:
        """Start the rank's next action if all prerequisites are done."""
        at = self._next[rank]
        if self._running[rank] or at == self._ends[rank] or self._needs[at]:
            return
        self._running[rank] = True
        action = self._actions[at]
        self._begin[action] = now
        self._push(max(now + self._seconds(action), self._earliest_s(action)), at, -1)

    def _ended(self, number: int, now: float) -> None:
        rank, action = self._rank_of[number], self._actions[number]
        self._end[action] = now
        self._running[rank] = False
        self._next[rank] += 1
        for there in self._wanted[number]:
            if self._rank_of[there] == rank:  # nothing is sent
                self._push(now, number, there)
                continue
            other, begin = self._actions[there], now
            sent = self._transfer(action, other)
            if sent.over is not None:
                begin = max(now, self._busy.get(sent.over, 0.0))
                self._busy[sent.over] = begin + sent.seconds
            self._sent[action, other] = begin, begin + sent.seconds
            self._push(begin + sent.seconds, number, there)
        self._start(rank, now)

    def _push(self, time: float, action: int, there: int) -> None:
        self._pushed += 1  # simultaneous events keep their order of insertion
        heapq.heappush(self._events, (time, self._pushed, action, there))


@dataclass
class _ReadinessSimulation:
    """Simulated step, with equally busy workers per stage, to choose each rank's next action by
    readiness."""

    pipeline: MicroBatchSchedule
    more: int = 0  # forward passes allowed to wait, beyond `MicroBatchSchedule.in_flight`
    _done: dict[Action, float] = field(default_factory=dict)

    def run(self) -> dict[int, tuple[Action, ...]] | None:
        """Return each rank's actions; None after a deadlock."""
        pipeline = self.pipeline
        ranks = {rank: _RankProgress(pipeline, rank, self.more) for rank in pipeline.ranks}
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
            # The rank itself, and ranks waiting for this action.
            for other in {rank, *self._after(action)}:
                heapq.heappush(wakes, (one.free, other))
        if not all(one.finished for one in ranks.values()):
            return None
        return {rank: tuple(one.order) for rank, one in ranks.items()}

    def _ready(self, now: float, action: Action) -> bool:
        return all(self._done.get(one, float("inf")) <= now for one in self.pipeline.needs(action))

    def _after(self, action: Action) -> Iterator[int]:
        """Yield the ranks that may wait for the end of `action`."""
        step = 1 if action.kind == "forward" else -1
        seat = self.pipeline.assignment_of.get((action.stage + step, action.batch))
        if seat is not None:
            yield seat.rank

    def _seconds(self, action: Action) -> float:
        """Return relative seconds: a full backward takes two forwards, activations or weights
        one."""
        seat = self.pipeline.assignment_of[action.stage, action.batch]
        whole = action.kind == "backward" and self.pipeline.schedule != "zero-bubble"
        return (2.0 if whole else 1.0) / len(seat.batches)


class _RankProgress:
    """Progress of a rank: actions done, and actions left."""

    def __init__(self, pipeline: MicroBatchSchedule, rank: int, more: int) -> None:
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
        """Return the next action that need not wait, if any."""
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
