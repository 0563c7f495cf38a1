"""Exact counts of plans of several stages: the deal of micro-batches, and the room for all.

Inside a group, micro-batches go to workers by speed, and state to free memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, permutations, product
from math import ceil, comb, prod

import numpy as np

from gpumix.cost.pipeline.staged_step import StagedStep
from gpumix.cost.tensor_parallel_groups import compute_buffer_bytes
from gpumix.planner.common.policy_shortage import NearestMiss
from gpumix.planner.common.strategy import is_within_memory
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import (
    Counts,
    Cut,
    UncutCandidate,
    WorkerMicroBatches,
    build_staged_plan,
    list_leaders,
)
from gpumix.planner.pipeline_parallel.stage_modes import NO_TENSOR_PARALLEL
from gpumix.schema.plan.plan import Plan, WorkerPrediction, ZeroStage

FEW_DEALS = 200  # up to this many ways to deal micro-batches, all are tried
FEW_WAVES = 8  # up to this many, all are tried
MIN_RELATIVE_GAIN = 1e-9
ROUNDING_BYTES = 4096  # set aside for the rounding of cuts, to elements
OVERHEAD_ACTIONS = 40  # work of a count next to replaying, in actions


@dataclass(frozen=True)
class CutCandidate:
    """A plan without a placement of state.

    Attributes:
        deal: micro-batches of each worker; None: dealt inside each group by speed.
        waves: None: some numbers are tried.
    """

    way: UncutCandidate
    zero_stage: ZeroStage
    cut: Cut
    deal: Counts | None = None
    waves: int | None = None


@dataclass(frozen=True)
class FoundPlan:
    """A dealt candidate as a fitting plan, and the seconds of its step."""

    seconds: float
    candidate: CutCandidate
    plan: Plan


class CandidateEvaluator:
    """Exact counting of candidates to train `batch` samples a step.

    Attributes:
        work: actions replayed, plus the work next to replaying.
        misses: plans that do not fit.
        too_full: dealt candidates that do not fit, and the seconds of their steps.
    """

    def __init__(self, pace_of: CallTimesCache, batch: int) -> None:
        self._pace_of = pace_of
        self._profile = pace_of.profiles[NO_TENSOR_PARALLEL]
        self._batch = batch
        self.work = 0
        self.misses = NearestMiss("a plan of several stages")
        self.too_full: dict[CutCandidate, float] = {}

    def best(self, candidate: CutCandidate, below_s: float) -> FoundPlan | None:
        """Return the fastest plan of a candidate; None if none fits or is faster than `below_s`."""
        dealt, best = self._dealt(candidate), None
        for waves in _waves(dealt):
            found = self._counted(replace(dealt, waves=waves), below_s)
            if found is not None:
                best, below_s = found, found.seconds
        return best

    def best_deal(self, candidate: CutCandidate, below_s: float) -> tuple[FoundPlan | None, bool]:
        """Return the fastest plan of all deals, if few, and True if all plans were tried."""
        count, seconds = self._count(candidate.way), self._seconds(candidate)
        deals: Iterable[Counts] = [self._dealt(candidate).deal or ()]
        complete = prod(comb(count + len(one) - 1, len(one) - 1) for one in seconds) <= FEW_DEALS
        if complete:
            whole = self._batch // candidate.way.micro_batch
            every = product(*(_deals_within(count, one, below_s, count - whole) for one in seconds))
            deals = dict.fromkeys(chain(deals, every))  # the best come first
        best: FoundPlan | None = None
        for deal in deals:
            dealt = replace(candidate, deal=deal)
            most = _most_waves(dealt)
            complete = complete and most <= FEW_WAVES
            for waves in range(1, most + 1) if most <= FEW_WAVES else [None]:
                found = self.best(replace(dealt, waves=waves), below_s)
                if found is not None:
                    best, below_s = found, found.seconds
        return best, complete

    def _dealt(self, candidate: CutCandidate) -> CutCandidate:
        if candidate.deal is not None:
            return candidate
        count = self._count(candidate.way)
        deal = tuple(deal_by_speed(count, seconds) for seconds in self._seconds(candidate))
        return replace(candidate, deal=deal)

    def _counted(self, candidate: CutCandidate, below_s: float) -> FoundPlan | None:
        assert candidate.deal is not None and candidate.waves is not None
        plan = build_staged_plan(
            self._profile,
            self._batch,
            candidate.way,
            candidate.cut,
            candidate.deal,
            zero_stage=candidate.zero_stage,
            waves=candidate.waves,
            strategy="staged",
        )
        step = self._step(plan)
        if step.seconds >= below_s * (1 - MIN_RELATIVE_GAIN):
            return None
        workers = self._workers(plan, step)
        if not is_within_memory(workers):
            moved = None if plan.zero_stage == 0 else _move_state(plan, step, workers)
            step = step if moved is None else self._step(moved)
            if moved is None or not is_within_memory(self._workers(moved, step)):
                self.misses.note(plan.of_leaders, workers)
                self.too_full[candidate] = step.seconds
                return None
            plan = moved
        if step.seconds >= below_s * (1 - MIN_RELATIVE_GAIN):
            return None
        return FoundPlan(step.seconds, candidate, plan)

    def _step(self, plan: Plan) -> StagedStep:
        step = StagedStep(self._profile, plan)
        self.work += sum(map(len, step.pipeline.orders.values())) + OVERHEAD_ACTIONS
        return step

    def _count(self, way: UncutCandidate) -> int:
        """Return the micro-batches of a step."""
        return ceil(self._batch / way.micro_batch)

    def _seconds(self, candidate: CutCandidate) -> list[list[float]]:
        """Return each worker's seconds per micro-batch, by group, in all stages of the group."""
        way, cut = candidate.way, candidate.cut
        sizes, ends = (min(way.micro_batch, self._batch),), list(pairwise((0, *cut)))
        found = []
        for place, group in enumerate(way.row):
            workers = list_leaders(group, way.manners[place].tp.degree)
            of_class: dict[str, float] = {}
            for name in {worker.device_class for worker in workers}:
                of_class[name] = 0.0
                for stage in range(place, len(cut), len(way.row)):
                    manner, (begin, end) = way.manners[stage], ends[stage]
                    pace = self._pace_of(name, manner.tp, manner.mode, sizes)
                    of_class[name] += float(pace.stage_s(np.array(begin), np.array(end))[0])
            found.append([of_class[worker.device_class] for worker in workers])
        return found

    def _workers(self, plan: Plan, step: StagedStep) -> list[WorkerPrediction]:
        """Return the predictions of the first worker of each tensor-parallel group."""
        found = list(step.workers())
        if plan.uses_tensor_parallel:
            told = {
                worker.device: compute_buffer_bytes(self._profile, plan, number, worker)
                for number, stage in enumerate(plan.stages)
                for worker in stage.leaders
                if stage.get_tp_size(worker) > 1
            }
            found = [
                w.model_copy(
                    update={"memory_bytes": w.memory_bytes | {"tensor parallel": told[w.device]}}
                )
                if w.device in told
                else w
                for w in found
            ]
        return found


def _move_state(plan: Plan, step: StagedStep, expected: Sequence[WorkerPrediction]) -> Plan | None:
    """Move state to workers with room, as evenly as possible; None if room is missing."""
    free = {w.device: w.memory_limit_bytes - w.peak_bytes for w in expected}
    stages = []
    for number, stage in enumerate(plan.stages):
        cost, most = step.stages[number], []
        for worker in cost.workers:
            model = cost.profile.model_of(worker.device_class)
            per_share = cost.memory.state(model).bytes_per_share
            room = (free[worker.device] - ROUNDING_BYTES * plan.cut_multiple) / per_share
            most.append(min(1.0, worker.state_share + room))
        if min(most) < 0.0 or sum(most) < 1.0:
            return None
        workers = tuple(
            worker.model_copy(update={"state_share": share})
            for tp_group, share in zip(stage.tp_groups, _filled(most))
            for worker in tp_group
        )
        stages.append(stage.model_copy(update={"workers": workers}))
    return plan.model_copy(update={"stages": tuple(stages)})


def iterate_neighbor_deals(candidate: CutCandidate) -> Iterator[CutCandidate]:
    """Yield candidates with a micro-batch moved between workers of two classes of a group."""
    way, deals = candidate.way, candidate.deal or ()
    for place, deal in enumerate(deals):
        of_class: dict[str, list[int]] = {}
        for number, worker in enumerate(list_leaders(way.row[place], way.manners[place].tp.degree)):
            of_class.setdefault(worker.device_class, []).append(number)
        for givers, takers in permutations(of_class.values(), 2):
            giver = max(givers, key=lambda number: deal[number])
            taker = min(takers, key=lambda number: deal[number])
            if deal[giver]:
                moved = list(deal)
                moved[giver], moved[taker] = deal[giver] - 1, deal[taker] + 1
                others = (*deals[:place], tuple(moved), *deals[place + 1 :])
                yield replace(candidate, deal=others)


def _most_waves(candidate: CutCandidate) -> int:
    """Return the most waves: each stage needs a worker with a micro-batch in every wave."""
    if candidate.zero_stage < 2:
        return 1
    return min(map(max, candidate.deal or ()))


def _waves(candidate: CutCandidate) -> list[int]:
    """Return the numbers of waves to try."""
    most, groups = _most_waves(candidate), len(candidate.way.row)
    if candidate.waves is not None:
        return [min(most, candidate.waves)]
    return sorted({min(most, waves) for waves in (groups, 2 * groups, 4 * groups, most)})


def _deals_within(
    count: int, seconds: Sequence[float], below_s: float, smaller: int = 0
) -> Iterator[WorkerMicroBatches]:
    """Yield deals keeping every worker below `below_s`, counting up to `smaller` micro-batches of
    each worker as free."""
    if len(seconds) == 1:
        if (count - smaller) * seconds[0] < below_s:
            yield (count,)
        return
    for own in range(count + 1):
        if (own - smaller) * seconds[0] >= below_s:
            return
        for rest in _deals_within(count - own, seconds[1:], below_s, smaller):
            yield (own, *rest)


def deal_by_speed(count: int, seconds: Sequence[float]) -> WorkerMicroBatches:
    """Deal micro-batches to workers taking `seconds` for each, with the busiest worker least busy;
    ties go to the first."""
    given = [0] * len(seconds)
    heap = [(each, place) for place, each in enumerate(seconds)]
    heapq.heapify(heap)
    for _ in range(count):
        busy, place = heapq.heappop(heap)
        given[place] += 1
        heapq.heappush(heap, (busy + seconds[place], place))
    return tuple(given)


def _filled(most: Sequence[float]) -> list[float]:
    """Return shares adding up to 1, as equal as `most` of each allows."""
    shares, left = [0.0] * len(most), 1.0
    order = sorted(range(len(most)), key=lambda place: most[place])
    for done, place in enumerate(order):
        shares[place] = min(most[place], left / (len(order) - done))
        left -= shares[place]
    return shares
