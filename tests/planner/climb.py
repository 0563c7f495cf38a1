"""A search that knows nothing of the planner's: random plans of several stages, and from the best
of them whatever is one change away and faster. Each plan is judged by the cost model alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from gpumix.planner.common.strategy import PlanRequest, ranked_devices
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import UncutCandidate
from gpumix.planner.pipeline_parallel.micro_batch_counts import CandidateEvaluator, CutCandidate
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    StageMode,
    StageModes,
    get_group_kind,
)
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Plan, Schedule, ZeroStage
from gpumix.schema.profile.profile import Profile

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "eager-1f1b", "gpipe", "zero-bubble")
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
MOST_STAGES = 4
RANDOM_PART = 0.5  # of the budget


class Climb:
    """Looks for fast plans of stages of devices that compute alone.

    Args:
        budget: plans that are counted.
    """

    def __init__(self, profile: Profile, request: PlanRequest, *, budget: int, seed: int) -> None:
        self._profile = profile
        self._batch = request.global_batch
        self._devices = ranked_devices(profile, request)
        self._cuts = profile.model.cuts
        pace_of = CallTimesCache(profile)
        self._manners = StageModes(pace_of.profiles, request.space)
        self._counting = CandidateEvaluator(pace_of, self._batch)
        self._random = Random(seed)
        self._left = budget
        self._best_s = float("inf")
        self._best: CutCandidate | None = None
        self.plan: Plan | None = None

    def run(self) -> float:
        """Seconds of the fastest plan that was found; infinite where none fits."""
        first = int(self._left * (1 - RANDOM_PART))
        while self._left > first:
            self._try(self._drawn())
        while self._best is not None and self._left > 0:
            before = self._best_s
            others = list(self._neighbours(self._best))
            self._random.shuffle(others)
            for other in others:
                self._try(other)
                if self._best_s < before or self._left <= 0:
                    break
            else:
                break
        return self._best_s

    def _try(self, candidate: CutCandidate | None) -> None:
        self._left -= 1
        if candidate is None:
            return
        found = self._counting.best(candidate, self._best_s)
        if found is not None:
            self._best, self._best_s, self.plan = candidate, found.seconds, found.plan

    def _drawn(self) -> CutCandidate | None:
        random = self._random
        devices = list(self._devices)
        random.shuffle(devices)
        most = min(MOST_STAGES, len(devices), len(self._cuts) + 1)
        stages = random.randint(2, most)
        ends = sorted(random.sample(range(1, len(devices)), stages - 1))
        row = [devices[a:b] for a, b in zip([0, *ends], [*ends, len(devices)])]
        cut = [*sorted(random.sample(self._cuts, stages - 1)), len(self._profile.model.calls)]
        size = random.choice([n for n in (1, 2, 3, 4, 6, 8, 16) if n <= self._batch])
        return self._candidate(
            row, cut, random.choice(SCHEDULES), random.choice(ZERO_STAGES), size, waves=None
        )

    def _candidate(
        self,
        row: list[list[Device]],
        cut: list[int],
        schedule: Schedule,
        zero_stage: ZeroStage,
        size: int,
        *,
        waves: int | None,
    ) -> CutCandidate | None:
        """With a manner for each stage that is drawn; None where there is none."""
        groups = tuple(tuple(d for d in self._devices if d in group) for group in row)
        manners: list[StageMode] = []
        for number, group in enumerate(groups):
            every = self._manners.of(get_group_kind(group), schedule, last=number == len(row) - 1)
            alone = [manner for manner in every if manner.team == NO_TENSOR_PARALLEL]
            if not alone:
                return None
            manners.append(self._random.choice(alone))
        way = UncutCandidate(groups, tuple(manners), schedule, size)
        return CutCandidate(way, zero_stage, tuple(cut), waves=waves)

    def _neighbours(self, one: CutCandidate) -> Iterator[CutCandidate | None]:
        way, row = one.way, [list(group) for group in one.way.row]
        for giver, group in enumerate(row):
            for device in group if len(group) > 1 else ():
                for taker in range(len(row)):
                    if taker != giver:
                        moved = [[d for d in g if d != device] for g in row]
                        moved[taker].append(device)
                        yield self._like(one, moved)
        for first in range(len(row) - 1):
            yield self._like(one, [*row[:first], row[first + 1], row[first], *row[first + 2 :]])
        for place in range(len(one.cut) - 1):
            for end in (one.cut[place] - 1, one.cut[place] + 1):
                cut = (*one.cut[:place], end, *one.cut[place + 1 :])
                if end in self._cuts and list(cut) == sorted(set(cut)):
                    yield replace(one, cut=cut)
        for size in (way.micro_batch - 1, way.micro_batch + 1, 2 * way.micro_batch):
            if 0 < size <= self._batch:
                yield replace(one, way=replace(way, micro_batch=size))
        for zero_stage in ZERO_STAGES:
            yield replace(one, zero_stage=zero_stage)
        for schedule in SCHEDULES:
            yield self._candidate(
                row, list(one.cut), schedule, one.zero_stage, way.micro_batch, waves=one.waves
            )

    def _like(self, one: CutCandidate, row: list[list[Device]]) -> CutCandidate | None:
        way = one.way
        return self._candidate(
            row, list(one.cut), way.schedule, one.zero_stage, way.micro_batch, waves=one.waves
        )
