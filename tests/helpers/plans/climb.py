"""Searches that know nothing of the planner's: from random plans of several stages, and from plans
of others, whatever is one change away and faster. Each plan is judged by the cost model alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from random import Random

from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import (
    UncutCandidate,
    get_stages_per_group,
    list_leaders,
)
from gpumix.planner.pipeline_parallel.device_order import get_device_place
from gpumix.planner.pipeline_parallel.micro_batch_counts import CandidateEvaluator, CutCandidate
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    StageMode,
    StageModes,
    TensorParallelDegree,
    get_group_kind,
    get_measured_tp_degrees,
    list_tp_degrees,
)
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Plan, Schedule
from gpumix.schema.profile.profile import Profile

MOST_STAGES = 6
RANDOM_PART = 0.15  # of the budget of a climb, to find where it begins
STARTS = 4  # climbs from random plans, beside those from given ones

Groups = list[list[Device]]


class Climb:
    """Looks for fast plans of several stages: climbs from given plans, and from random ones.

    Args:
        budget: plans that are counted.
        starts: plans to begin with; those of one stage are passed over.
    """

    def __init__(
        self,
        profile: Profile,
        request: PlanRequest,
        *,
        budget: int,
        seed: int,
        starts: Iterable[Plan] = (),
    ) -> None:
        self._profile = profile
        self._batch, space = request.global_batch, request.space
        self._devices = list_devices_by_rank(profile, request)
        self._cuts = profile.model.cuts
        degrees = get_measured_tp_degrees(profile).intersection(list_tp_degrees(space))
        pace_of = CallTimesCache(profile, {NO_TENSOR_PARALLEL, *degrees})
        self._manners = StageModes(pace_of.profiles, space)
        self._schedules = list(space.pipeline_schedules)
        self._zero_stages = sorted(set(space.zero_stages))
        self._may_leave_out = bool(space.leave_out)
        self._largest = max(self._manners.largest_of_class(d.device_class) for d in self._devices)
        self._counting = CandidateEvaluator(pace_of, self._batch)
        self._random = Random(seed)
        self._left = self._budget = budget
        self._starts = [self._of_plan(plan) for plan in starts if self._can_start(plan)]
        self._here_s = self._best_s = float("inf")
        self._here: CutCandidate | None = None
        self.plan: Plan | None = None

    def run(self) -> float:
        """Seconds of the fastest plan that was found; infinite where none fits."""
        if len(self._devices) < 2 or not self._cuts:
            return float("inf")
        climbs = len(self._starts) + STARTS
        for number in range(climbs):
            end = self._budget - self._budget * (number + 1) // climbs
            self._here, self._here_s = None, float("inf")
            if number < len(self._starts):
                self._try(self._starts[number])
            first = end + int((self._left - end) * (1 - RANDOM_PART))
            while self._left > (
                first if self._here is None or number >= len(self._starts) else end
            ):
                if number < len(self._starts) and self._here is not None:
                    break
                self._try(self._drawn())
            self._climb(end)
        return self._best_s

    def _climb(self, end: int) -> None:
        while self._here is not None and self._left > end:
            before = self._here_s
            others = list(self._neighbours(self._here))
            self._random.shuffle(others)
            for other in others:
                self._try(other)
                if self._here_s < before or self._left <= end:
                    break
            else:
                return

    def _try(self, candidate: CutCandidate | None) -> None:
        if candidate is None:
            self._left -= 1 if self._here is None else 0
            return
        self._left -= 1
        found = self._counting.best(candidate, self._here_s)
        if found is None:
            return
        self._here, self._here_s = found.candidate, found.seconds
        if found.seconds < self._best_s:
            self._best_s, self.plan = found.seconds, found.plan

    # -- plans to begin with -----------------------------------------------------------------------

    def _can_start(self, plan: Plan) -> bool:
        return len(plan.stages) > 1 and not any(stage.has_mixed_degrees for stage in plan.stages)

    def _of_plan(self, plan: Plan) -> CutCandidate:
        by_id = {device.id: device for device in self._devices}
        groups = len(plan.stages) // get_stages_per_group(plan.schedule)
        row = tuple(
            tuple(by_id[worker.device] for worker in stage.workers)
            for stage in plan.stages[:groups]
        )
        manners = tuple(
            StageMode(TensorParallelDegree(stage.tensor, stage.sequence), stage.workers[0].mode)
            for stage in plan.stages
        )
        size = max(worker.micro_batch for worker in plan.workers)
        ends, end = [], 0
        for stage in plan.stages:
            end += len(stage.units)
            ends.append(end)
        deal = tuple(
            tuple(len(leader.micro_batches) for leader in stage.leaders)
            for stage in plan.stages[:groups]
        )
        way = UncutCandidate(row, manners, plan.schedule, size)
        return CutCandidate(way, plan.zero_stage, tuple(ends), deal, plan.waves)

    def _drawn(self) -> CutCandidate | None:
        random = self._random
        devices = list(self._devices)
        if random.random() < 0.5:  # like devices stay together
            cells = list(dict.fromkeys(map(get_device_place, devices)))
            random.shuffle(cells)
            devices.sort(key=lambda device: cells.index(get_device_place(device)))
        else:
            random.shuffle(devices)
        schedule = random.choice(self._schedules)
        rounds = get_stages_per_group(schedule)
        most = min(MOST_STAGES, len(devices), (len(self._cuts) + 1) // rounds)
        if most < 2:
            return None
        groups = random.randint(2, most)
        ends = sorted(random.sample(range(1, len(devices)), groups - 1))
        row = [devices[a:b] for a, b in zip([0, *ends], [*ends, len(devices)])]
        cut = sorted(random.sample(self._cuts, groups * rounds - 1))
        size = random.choice([n for n in (1, 2, 3, 4, 6, 8, 16) if n <= self._batch])
        cut.append(len(self._profile.model.calls))
        return self._made(row, cut, schedule, random.choice(self._zero_stages), size)

    def _made(
        self,
        row: Groups,
        cut: Iterable[int],
        schedule: Schedule,
        zero_stage: int,
        size: int,
        *,
        like: tuple[StageMode, ...] = (),
    ) -> CutCandidate | None:
        """A candidate with the manners of `like`, or drawn ones; None where there are none."""
        rounds = get_stages_per_group(schedule)
        groups = tuple(tuple(d for d in self._devices if d in group) for group in row)
        manners: list[StageMode] = []
        for number in range(len(groups) * rounds):
            place, last = number % len(groups), number == len(groups) * rounds - 1
            every = self._manners.of(get_group_kind(groups[place]), schedule, last=last)
            if number >= len(groups):  # a group's devices stay in their tensor-parallel groups
                every = tuple(one for one in every if one.tp == manners[place].tp)
            wanted = [one for one in every if number < len(like) and one == like[number]]
            if not every:
                return None
            manners.append((wanted or [self._random.choice(every)])[0])
        if size > self._largest:
            return None
        way = UncutCandidate(groups, tuple(manners), schedule, size)
        return CutCandidate(way, zero_stage, tuple(cut))

    def _is_measured(self, way: UncutCandidate) -> bool:
        every = enumerate(way.manners)
        return all(
            manner
            in self._manners.of(
                get_group_kind(way.row[place % len(way.row)]),
                way.schedule,
                last=place == len(way.manners) - 1,
            )
            for place, manner in every
        )

    # -- what is one change away -------------------------------------------------------------------

    def _neighbours(self, one: CutCandidate) -> Iterator[CutCandidate | None]:
        yield from self._other_groups(one)
        yield from self._other_cuts(one)
        way = one.way
        for place, manner in enumerate(way.manners):
            group = way.row[place % len(way.row)]
            last = place == len(way.manners) - 1
            for other in self._manners.of(get_group_kind(group), way.schedule, last=last):
                if other != manner:
                    manners = list(way.manners)
                    for alike in range(place % len(way.row), len(manners), len(way.row)):
                        manners[alike] = replace(manners[alike], tp=other.tp)
                    manners[place] = other
                    changed = replace(way, manners=tuple(manners))
                    if self._is_measured(changed):
                        same = other.tp == manner.tp
                        yield replace(one, way=changed, deal=one.deal if same else None)
        size = way.micro_batch
        for other_size in {size - 1, size + 1, 2 * size, size // 2, size + 3}:
            if 0 < other_size <= min(self._batch, self._largest):
                yield replace(one, way=replace(way, micro_batch=other_size), deal=None, waves=None)
        for zero_stage in self._zero_stages:
            yield replace(one, zero_stage=zero_stage, waves=None)
        row = [list(group) for group in way.row]
        for schedule in self._schedules:
            if get_stages_per_group(schedule) == get_stages_per_group(way.schedule):
                yield self._made(row, one.cut, schedule, one.zero_stage, size, like=way.manners)
        if one.waves and one.zero_stage > 1:
            for waves in {one.waves - 1, one.waves + 1, 2 * one.waves, one.waves // 2}:
                if waves > 0:
                    yield replace(one, waves=waves)
        yield from self._other_deals(one)

    def _other_groups(self, one: CutCandidate) -> Iterator[CutCandidate | None]:
        row = [list(group) for group in one.way.row]
        for giver, group in enumerate(row):
            for device in {get_device_place(device): device for device in group}.values():
                rest = [[d for d in g if d != device] for g in row]
                for taker in range(len(row)) if len(group) > 1 else ():
                    if taker != giver:
                        moved = [list(g) for g in rest]
                        moved[taker].append(device)
                        yield self._like(one, moved)
                if len(group) > 1 and self._may_leave_out:
                    yield self._like(one, rest)
                for taker in range(giver + 1, len(row)):
                    for other in {get_device_place(d): d for d in row[taker]}.values():
                        if get_device_place(other) != get_device_place(device):
                            swapped = [[d for d in g if d != other] for g in rest]
                            swapped[taker].append(device)
                            swapped[giver].append(other)
                            yield self._like(one, swapped)
        for a, b in permutations(range(len(row)), 2):
            if a < b:
                order = list(row)
                order[a], order[b] = row[b], row[a]
                yield self._like(one, order)
        used = {device for group in row for device in group}
        for device in self._devices:
            if device not in used:
                for taker in range(len(row)):
                    yield self._like(one, [g + [device] * (n == taker) for n, g in enumerate(row)])

    def _other_cuts(self, one: CutCandidate) -> Iterator[CutCandidate | None]:
        way, row = one.way, [list(group) for group in one.way.row]
        for place in range(len(one.cut) - 1):
            for step in (-2, -1, 1, 2):
                cut = list(one.cut)
                cut[place] += step
                if cut[place] in self._cuts and cut == sorted(set(cut)):
                    yield replace(one, cut=tuple(cut))
        for place in range(len(one.cut) - 2):  # a stage moves as a whole
            for step in (-1, 1):
                cut = list(one.cut)
                cut[place] += step
                cut[place + 1] += step
                if {cut[place], cut[place + 1]} <= set(self._cuts) and cut == sorted(set(cut)):
                    yield replace(one, cut=tuple(cut))
        if get_stages_per_group(way.schedule) > 1:
            return
        for place in range(len(row) - 1) if len(row) > 2 else ():  # two stages become one
            joined = [*row[:place], row[place] + row[place + 1], *row[place + 2 :]]
            cut = [*one.cut[:place], *one.cut[place + 1 :]]
            yield self._made(joined, cut, way.schedule, one.zero_stage, way.micro_batch)
        for place, group in enumerate(row):  # a stage becomes two
            begin, end = (0, *one.cut)[place], one.cut[place]
            inner = [cut for cut in self._cuts if begin < cut < end]
            if len(group) > 1 and inner:
                half, middle = len(group) // 2, inner[len(inner) // 2]
                parts = [*row[:place], group[:half], group[half:], *row[place + 1 :]]
                cut = [*one.cut[:place], middle, *one.cut[place:]]
                yield self._made(parts, cut, way.schedule, one.zero_stage, way.micro_batch)

    def _other_deals(self, one: CutCandidate) -> Iterator[CutCandidate]:
        for place, deal in enumerate(one.deal or ()):
            degree = one.way.manners[place].tp.degree
            leaders = list_leaders(one.way.row[place], degree)
            alike = {(get_device_place(d), n): at for at, (d, n) in enumerate(zip(leaders, deal))}
            for giver, taker in permutations(alike.values(), 2):
                if deal[giver]:
                    moved = list(deal)
                    moved[giver] -= 1
                    moved[taker] += 1
                    every = list(one.deal or ())
                    every[place] = tuple(moved)
                    yield replace(one, deal=tuple(every))

    def _like(self, one: CutCandidate, row: Groups) -> CutCandidate | None:
        way = one.way
        return self._made(
            row, one.cut, way.schedule, one.zero_stage, way.micro_batch, like=way.manners
        )
