"""Plans of several stages counted exactly: who gets which micro-batches, and whether all fits.

Inside a group micro-batches go to workers as they are fast, and state to where there is room.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil, comb, prod

import numpy as np

from gpumix.cost.staged import StagedStep
from gpumix.cost.teams import buffer_bytes
from gpumix.planner.base import fit
from gpumix.planner.manner import ALONE
from gpumix.planner.misfit import Misses
from gpumix.planner.pace import PaceOf
from gpumix.planner.way import Counts, Cut, Deal, Way, assemble_stages, leaders
from gpumix.spec.plan import Plan, WorkerPrediction, ZeroStage

FEW_DEALS = 200  # ways to deal micro-batches, of which all are looked at
ENOUGH = 1e-9
ROUNDING_BYTES = 4096  # set aside for the rounding of cuts
BESIDE_ACTIONS = 40  # a count does as much beside replaying them


@dataclass(frozen=True)
class Candidate:
    """A plan but for who gets which micro-batches.

    Attributes:
        seconds: that its step may take, or takes at the least.
    """

    seconds: float
    way: Way
    zero_stage: ZeroStage
    cut: Cut


@dataclass(frozen=True)
class Found:
    """A candidate as a plan that fits, and the seconds of its step."""

    seconds: float
    candidate: Candidate
    plan: Plan


class Counting:
    """Counts candidates to train `batch` samples a step.

    Attributes:
        work: actions that were replayed, and what is done beside.
        misses: plans that do not fit.
    """

    def __init__(self, pace_of: PaceOf, batch: int) -> None:
        self._pace_of = pace_of
        self._profile = pace_of.profiles[ALONE]
        self._batch = batch
        self.work = 0
        self.misses = Misses("a plan of several stages")

    def best(self, candidate: Candidate, below_s: float, *, every_deal: bool) -> Found | None:
        """The fastest plan of a candidate; None if none fits, or is faster than `below_s`."""
        best: Found | None = None
        for counts in self._deals(candidate, below_s, every=every_deal):
            for waves in _waves(candidate, counts):
                found = self._count(candidate, counts, waves, below_s)
                if found is not None:
                    best, below_s = found, found.seconds
        return best

    def _count(
        self, candidate: Candidate, counts: Counts, waves: int, below_s: float
    ) -> Found | None:
        try:
            plan = assemble_stages(
                self._profile,
                self._batch,
                candidate.way,
                candidate.cut,
                counts,
                zero_stage=candidate.zero_stage,
                waves=waves,
                strategy="staged",
            )
        except ValueError:
            return None  # waves that do not cut all stages' micro-batches alike
        step = StagedStep(self._profile, plan)
        self.work += sum(map(len, step.pipeline.orders.values())) + BESIDE_ACTIONS
        if step.seconds >= below_s * (1 - ENOUGH):
            return None
        fitting = self._fitting(plan, step)
        return None if fitting is None else Found(step.seconds, candidate, fitting)

    def _deals(self, candidate: Candidate, below_s: float, *, every: bool) -> Iterator[Counts]:
        """How many micro-batches each worker of each group may get: that which makes the busiest
        least busy, then all others if there are few."""
        way, cut = candidate.way, candidate.cut
        count = ceil(self._batch / way.micro_batch)
        seconds = [self._seconds(way, cut, place) for place in range(len(way.row))]
        first = tuple(spread(count, of_group) for of_group in seconds)
        yield first
        ways = (comb(count + len(group) - 1, len(group) - 1) for group in seconds)
        if not every or prod(ways) > FEW_DEALS:
            return
        others = [
            [
                deal
                for deal in _deals(count, len(of_group))
                if max(n * s for n, s in zip(deal, of_group)) < below_s
            ]
            for of_group in seconds
        ]
        yield from (deals for deals in product(*others) if deals != first)

    def _seconds(self, way: Way, cut: Cut, place: int) -> list[float]:
        """Of one micro-batch on each worker of a group, in all of its stages."""
        sizes, stages = (min(way.micro_batch, self._batch),), list(pairwise((0, *cut)))
        workers = leaders(way.row[place], way.manners[place].team.degree)
        of_class: dict[str, float] = {}
        for name in {worker.device_class for worker in workers}:
            of_class[name] = 0.0
            for stage in range(place, len(cut), len(way.row)):
                manner, (begin, end) = way.manners[stage], stages[stage]
                pace = self._pace_of(name, manner.team, manner.mode, sizes)
                of_class[name] += float(pace.stage_s(np.array(begin), np.array(end))[0])
        return [of_class[worker.device_class] for worker in workers]

    def _fitting(self, plan: Plan, step: StagedStep) -> Plan | None:
        """The plan with state where there is room for it; None if there is too little."""
        workers = self._workers(plan, step)
        if fit(workers):
            return plan
        moved = None if plan.zero_stage == 0 else _moved(plan, step, workers)
        if moved is not None and fit(self._workers(moved, StagedStep(self._profile, moved))):
            return moved
        self.misses.note(plan.of_leaders, workers)
        return None

    def _workers(self, plan: Plan, step: StagedStep) -> list[WorkerPrediction]:
        """What is expected of the first worker of each team."""
        found = list(step.workers())
        if plan.in_teams:
            told = {
                worker.device: buffer_bytes(self._profile, plan, number, worker)
                for number, stage in enumerate(plan.stages)
                for worker in stage.workers[:: stage.tensor]
                if stage.tensor > 1
            }
            found = [
                w.model_copy(update={"memory_bytes": w.memory_bytes | {"team": told[w.device]}})
                if w.device in told
                else w
                for w in found
            ]
        return found


def _moved(plan: Plan, step: StagedStep, expected: Sequence[WorkerPrediction]) -> Plan | None:
    """The plan with as much state on each worker as it has room for, as equal as that allows."""
    free = {w.device: w.memory_limit_bytes - w.peak_bytes for w in expected}
    stages = []
    for number, stage in enumerate(plan.stages):
        model, most = step.stages[number].memory, []
        for worker in stage.workers[:: stage.tensor]:
            per_share = model.state(worker.compute_dtype).bytes_per_share
            room = (free[worker.device] - ROUNDING_BYTES) / per_share
            most.append(min(1.0, worker.state_share + room))
        if min(most) < 0.0 or sum(most) < 1.0:
            return None
        workers = tuple(
            worker.model_copy(update={"state_share": share})
            for team, share in zip(stage.teams, _filled(most))
            for worker in team
        )
        stages.append(stage.model_copy(update={"workers": workers}))
    return plan.model_copy(update={"stages": tuple(stages)})


def _waves(candidate: Candidate, counts: Counts) -> list[int]:
    """Into how many waves micro-batches may be divided."""
    if candidate.zero_stage < 2:
        return [1]
    groups, most = len(candidate.way.row), min(max(of_group) for of_group in counts)
    wanted = (groups, 2 * groups, 4 * groups, most)
    return sorted({min(most, waves) for waves in wanted})


def _deals(count: int, workers: int) -> Iterator[Deal]:
    """All ways to deal so many micro-batches to workers."""
    if workers == 1:
        yield (count,)
        return
    for own in range(count + 1):
        for rest in _deals(count - own, workers - 1):
            yield (own, *rest)


def spread(count: int, seconds: Sequence[float]) -> Deal:
    """So many micro-batches over workers that take `seconds` for each: the busiest as little busy
    as may be, and of two that would be as busy the first one."""
    given = [0] * len(seconds)
    heap = [(each, place) for place, each in enumerate(seconds)]
    heapq.heapify(heap)
    for _ in range(count):
        busy, place = heapq.heappop(heap)
        given[place] += 1
        heapq.heappush(heap, (busy + seconds[place], place))
    return tuple(given)


def _filled(most: Sequence[float]) -> list[float]:
    """Shares that add up to 1, as equal as `most` of each allows."""
    shares, left = [0.0] * len(most), 1.0
    order = sorted(range(len(most)), key=lambda place: most[place])
    for done, place in enumerate(order):
        shares[place] = min(most[place], left / (len(order) - done))
        left -= shares[place]
    return shares
