"""Replay of one step of a plan, event by event.

Each rank has three streams: computation, its part in collectives, and copies to and from the host.
A collective starts once all ranks have issued it and the previous one is done, and takes equally
long on all of them. A call ends when computed and copied. While a collective runs, all ranks
compute at 1 / (1 + contention) of their speed, and so does the collective while any rank computes:
of two that start together, the last to end takes longer by contention x the shorter one, as counted
by `cost.step_time`.

Every event knows the event whose end let it start, so the walk back from the last event is the
critical path.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

from gpumix.cost.predict import predict
from gpumix.cost.tensor_parallel_groups import reduce_to_leaders
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.simulate.idle_intervals import iterate_idle_intervals
from gpumix.simulate.pipeline_simulation import simulate_stages
from gpumix.simulate.program import Collective, RankTask, StepProgram, build_program
from gpumix.simulate.replay import ROOT_CALL, EqualRanks, Event, Kind, Replay


@dataclass(frozen=True)
class ReplayedProgram(Replay):
    """A replayed program; `moved` has the start and end of each collective."""

    program: StepProgram
    moved: tuple[tuple[float, float], ...]


def simulate(profile: Profile, plan: Plan) -> Replay:
    """Simulate one step of `plan`.

    Raises:
        InputError: the profile is of another model, sequence length or precision, or lacks a
            device, a mode or a collective form of the plan.
    """
    if len(plan.stages) > 1:
        return _with_members(plan, simulate_stages(profile, plan))
    program = build_program(*reduce_to_leaders(profile, plan))
    running = _StepSimulation(program)
    running.run()
    events, moved = tuple(running.events), tuple(running.moved)
    played = ReplayedProgram(
        lanes=program.lanes,
        units=program.calls,
        events=events,
        idle=tuple(iterate_idle_intervals(program, events, moved)),
        predicted_s=predict(profile, plan).step_s,
        program=program,
        moved=moved,
    )
    return _with_members(plan, played)


def _with_members(plan: Plan, found: Replay) -> Replay:
    """Extend the replay of a plan's leaders to all ranks: tensor-parallel group members act
    alike."""
    if not plan.uses_tensor_parallel:
        return found
    numbers = {worker.device: rank for rank, worker in enumerate(plan.workers)}
    tp_groups = {
        tp_group[0].device: tp_group for stage in plan.stages for tp_group in stage.tp_groups
    }
    leaders = plan.of_leaders.workers
    lanes = [
        EqualRanks(
            tuple(numbers[w.device] for r in lane.ranks for w in tp_groups[leaders[r].device]),
            lane.worker,
        )
        for lane in found.lanes
    ]
    return replace(found, lanes=tuple(lanes))


@dataclass
class _LaneProgress:
    """The progress of one lane."""

    number: int
    tasks: tuple[RankTask, ...]
    issued: tuple[int, ...]
    done: int = 0  # finished tasks
    joined: int = 0  # issued collectives
    parts: int = 0  # unfinished parts of the current task: computing, copying
    start: float = 0.0  # of the current task
    cause: int | None = None


@dataclass
class _StepSimulation:
    """A step in progress.

    Computation is timed on a clock of its own, `work`, which runs slower while a collective runs:
    all ranks slow down together, so current tasks end at a known time of that clock.
    """

    program: StepProgram
    now: float = 0.0
    work: float = 0.0
    events: list[Event] = field(default_factory=list)
    moved: list[tuple[float, float]] = field(default_factory=list)  # finished collectives
    _computing: list[tuple[float, int]] = field(default_factory=list)  # heap: end by `work`, lane
    _copying: list[tuple[float, int]] = field(default_factory=list)  # heap: end, lane
    _moving: float | None = None  # seconds left of the current collective
    _start: float = 0.0  # of the current collective
    _cause: int | None = None

    def __post_init__(self) -> None:
        lanes = enumerate(self.program.lanes)
        self._ranks = [_LaneProgress(number, lane.tasks, lane.issued) for number, lane in lanes]
        self._issued = [0] * len(self.program.collectives)  # number of lanes per collective

    def run(self) -> None:
        """Run from the first event to the last."""
        overhead = self.program.overhead_s
        self.now = overhead
        self._settle(self._ranks, self._event("overhead", ROOT_CALL, None, 0.0, None))
        while self._computing or self._copying or self._moving is not None:
            self._next()

    def _next(self) -> None:
        """Advance to the next end of an activity, and start all work enabled by it."""
        slow = 1.0 / (1.0 + self.program.contention)
        pace = 1.0 if self._moving is None else slow
        ends = []
        if self._moving is not None:
            ends.append((self.now + self._moving / (slow if self._computing else 1.0), 0))
        if self._computing:
            ends.append((self.now + (self._computing[0][0] - self.work) / pace, 1))
        if self._copying:
            ends.append((self._copying[0][0], 2))
        then, what = min(ends)
        passed, self.now = max(0.0, then - self.now), max(then, self.now)
        if self._moving is not None:
            self._moving -= passed * (slow if self._computing else 1.0)
        self.work += passed * pace
        (self._end_collective, self._end_computing, self._end_copying)[what]()

    # -- ends ---------------------------------------------------------------------------------

    def _end_collective(self) -> None:
        self._moving = None
        move = self.program.collectives[len(self.moved)]
        self.moved.append((self._start, self.now))
        cause = self._event(move.kind, move.call, None, self._start, self._cause)
        self._settle(self._waiting(), cause)

    def _end_computing(self) -> None:
        self.work, number = heapq.heappop(self._computing)
        task = self._task(number)
        self._end_part(number, task.kind)

    def _end_copying(self) -> None:
        _, number = heapq.heappop(self._copying)
        forward = self._task(number).kind == "forward"
        self._end_part(number, "copy to host" if forward else "copy from host")

    def _end_part(self, number: int, kind: Kind) -> None:
        rank, task = self._ranks[number], self._task(number)
        cause = self._event(kind, task.call, number, rank.start, rank.cause, task.micro_batches)
        rank.parts -= 1
        if not rank.parts:
            rank.done += 1
            self._settle([rank], cause)

    def _event(
        self,
        kind: Kind,
        call: int,
        lane: int | None,
        start: float,
        cause: int | None,
        micro_batches: tuple[int, ...] = (),
    ) -> int | None:
        """Record an event ending now and return the number; without a duration, return the
        cause."""
        if self.now <= start:
            return cause
        self.events.append(Event(kind, call, lane, start, self.now, cause, micro_batches))
        return len(self.events) - 1

    # -- starts -------------------------------------------------------------------------------

    def _settle(self, ready: list[_LaneProgress], cause: int | None) -> None:
        """Let the ranks in `ready` continue, and all ranks enabled by them, due to the event
        `cause`."""
        while True:
            for rank in ready:
                self._go_on(rank, cause)
            ready = self._start_collectives(cause)
            if not ready:
                return

    def _go_on(self, rank: _LaneProgress, cause: int | None) -> None:
        """Issue collectives and start the next task that takes time, unless the rank has to
        wait."""
        while True:
            while rank.joined < len(rank.issued) and rank.issued[rank.joined] <= rank.done:
                self._issued[rank.joined] += 1
                rank.joined += 1
            if rank.done == len(rank.tasks) or self._task(rank.number).needs > len(self.moved):
                return
            task = self._task(rank.number)
            rank.start, rank.cause = self.now, cause
            if task.seconds > 0:
                heapq.heappush(self._computing, (self.work + task.seconds, rank.number))
                rank.parts += 1
            if task.copied_s > 0:
                heapq.heappush(self._copying, (self.now + task.copied_s, rank.number))
                rank.parts += 1
            if rank.parts:
                return
            rank.done += 1

    def _start_collectives(self, cause: int | None) -> list[_LaneProgress]:
        """Start the next collective once issued by all. Collectives without a duration finish at
        once, up to the first with ranks waiting: return these ranks."""
        while (collective := self._get_issued_collective()) is not None:
            if collective.seconds > 0:
                self._moving, self._start, self._cause = collective.seconds, self.now, cause
                break
            self.moved.append((self.now, self.now))
            if waiting := self._waiting():
                return waiting
        return []

    def _get_issued_collective(self) -> Collective | None:
        number = len(self.moved)
        if self._moving is not None or number == len(self._issued):
            return None
        everybody = self._issued[number] == len(self._ranks)
        return self.program.collectives[number] if everybody else None

    def _waiting(self) -> list[_LaneProgress]:
        """Return ranks waiting for collectives, all of which are done."""
        done = len(self.moved)
        return [
            rank
            for rank in self._ranks
            if not rank.parts
            and rank.done < len(rank.tasks)
            and rank.tasks[rank.done].needs <= done
        ]

    def _task(self, number: int) -> RankTask:
        rank = self._ranks[number]
        return rank.tasks[rank.done]
