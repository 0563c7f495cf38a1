"""The fastest plan of several stages: who stands where, which calls, which micro-batches.

A *way* is a row of groups (`planner.arrange`), a manner for each stage (`planner.manner`), a
schedule and a micro-batch size. All rows, with the best cut and manners of each, are estimated at
once (`planner.promise`); those that promise most are counted exactly (`planner.counted`), and then
what is like the best of them: other schedules, sizes, manners, and a call more or less in a stage.

Where there are few ways all are proven to be no faster: no step is shorter than what its busiest
worker computes, and what comes before and after that (`planner.cuts`). Candidates are counted in
the order of this least time, until none can be shorter than the best one. Where there are too many
`bound_s` tells how far from the plan the best one may be.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import comb, prod

import numpy as np

from gpumix.cost.predict import predict
from gpumix.planner.arrange import Row, rows
from gpumix.planner.base import PlanRequest, ranked_devices
from gpumix.planner.counted import ENOUGH, Candidate, Counting, Found
from gpumix.planner.cuts import FEW_CUTS, Cutter
from gpumix.planner.manner import (
    ALONE,
    Manner,
    Manners,
    kind_of,
    measured_teams,
    teams_of_space,
)
from gpumix.planner.pace import PaceOf
from gpumix.planner.promise import Promises, RowPromises
from gpumix.planner.way import Way, rounds_of
from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Mode, Plan, Schedule, ZeroStage
from gpumix.spec.profile import Profile

FEW_SIZES = 12  # micro-batch sizes; of more, so many
FEW_WAYS = 500  # of which all are looked at
FEW_STAGES = 4  # whose manners are changed one by one
# Of exact counts, in actions that are replayed: of what promises most, of what is like it, of all.
PROMISING, ALIKE, ALL = 8_000, 16_000, 30_000
PESSIMISM = 0.8  # a step takes no less than this part of its estimate
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "eager-1f1b", "gpipe", "zero-bubble", "interleaved")


def staged(profile: Profile, request: PlanRequest, below_s: float = float("inf")) -> Plan:
    """The fastest plan of several stages.

    Args:
        below_s: what takes longer is of no interest.

    Raises:
        InputError: the request names devices that the profile does not know, there is one device
            or one unit alone, or the profile does not say what units need of each other.
        NoFeasiblePlanError: no such plan fits, or all take longer than `below_s`.
    """
    return _Search(profile, request, below_s).run()


def refuse_one_stage(profile: Profile, devices: Sequence[Device]) -> None:
    """Raise an InputError where there can be no plan of several stages."""
    what = ""
    if len(devices) < 2:
        what = "one device alone has one stage"
    elif len(set(profile.model.calls)) < 2:
        what = "a model of one unit has one stage"
    elif not profile.model.needs:
        what = "the profile does not say what the model's units need of each other"
    if what:
        raise InputError(
            f"there is no plan of several stages: {what}",
            fix="use `strategy: optimal`, or profile again: `gpumix profile JOB.yaml --fresh`",
        )


class _Search:
    def __init__(self, profile: Profile, request: PlanRequest, below_s: float) -> None:
        self._profile = profile
        self._batch = request.global_batch
        self._space = request.space
        self._devices = ranked_devices(profile, request)
        self._below_s = below_s
        refuse_one_stage(profile, self._devices)
        most = min(len(profile.model.calls), len(self._devices))
        if request.space.least_stages > most:
            raise InputError(
                f"there is no plan of {request.space.least_stages} stages: there are "
                f"{len(self._devices)} devices, and {len(profile.model.calls)} units",
                fix=f"set techniques.least_stages to {most} at most",
            )
        teams = measured_teams(profile).intersection(teams_of_space(request.space))
        pace_of = PaceOf(profile, {ALONE, *teams})
        self._manners = Manners(pace_of.profiles, request.space)
        self._cutter = Cutter(pace_of, self._batch)
        self._counting = Counting(pace_of, self._batch)
        self._promises = Promises(
            pace_of, self._manners, request.space.zero_stages, self._batch, self._sizes
        )
        self._schedules = [one for one in SCHEDULES if one in request.space.schedules]
        self._best: Found | None = None
        self._seen: set[Candidate] = set()

    def run(self) -> Plan:
        ways = product(self._rows[0], self._schedules)
        if not any(self._zero_stages(row, schedule) for row, schedule in ways):
            raise NoFeasiblePlanError(
                f"there is no plan of at most {self._most_stages} stages by "
                f"{' or '.join(self._schedules)} at ZeRO stage "
                f"{', '.join(map(str, sorted(set(self._space.zero_stages))))}",
                why=f"interleaved has {rounds_of('interleaved')} stages for each group of devices, "
                "and zero-bubble divides no gradients",
                fix="allow `techniques: {schedules: [1f1b, ...]}`, or more stages",
            )
        bound_s = self._least_s
        if bound_s < self._best_s * (1 - ENOUGH):
            for schedule in self._schedules:  # the others are alike, where there is room for one
                self._count_what_promises(schedule)
                if self._best is not None:
                    break
            self._count_what_is_alike()
            bound_s = max(bound_s, self._prove())
        if self._best is None:
            raise self._counting.misses.error(self._profile)
        plan = self._best.plan
        expected = predict(self._profile, plan)
        bound_s = min(bound_s, expected.step_s)
        expected = expected.model_copy(update={"bound_s": bound_s})
        return plan.model_copy(update={"prediction": expected})

    @property
    def _best_s(self) -> float:
        return self._below_s if self._best is None else self._best.seconds

    @cached_property
    def _rows(self) -> tuple[list[Row], bool]:
        found, complete = rows(self._devices, self._most_stages)
        return [row for row in found if len(row) >= self._space.least_stages], complete

    @property
    def _most_stages(self) -> int:
        calls = len(self._profile.model.calls)
        return min(calls, self._space.most_stages or calls)

    @cached_property
    def _sizes(self) -> list[int]:
        """Micro-batch sizes: of those that make as many micro-batches the smallest."""
        limits = [c.largest_micro_batch for c in self._profile.classes]
        most = min([self._batch, *(n for n in limits if n is not None)])
        every = np.unique(-(-self._batch // np.arange(1, self._batch + 1)))
        every = every[every <= most]
        if len(every) > FEW_SIZES:
            places = np.geomspace(1, len(every), FEW_SIZES).astype(np.int64) - 1
            every = every[np.unique(places)]
        return [int(size) for size in every]

    def _zero_stages(self, row: Row, schedule: Schedule) -> list[ZeroStage]:
        """Where each stage has one device nothing is divided; nor is zero-bubble for gradients that
        are. None if the row has too many stages by this schedule."""
        if len(row) * rounds_of(schedule) > self._most_stages:
            return []
        every = sorted(set(self._space.zero_stages))
        found = [stage for stage in every if stage <= 1 or schedule != "zero-bubble"]
        return found[:1] if max(map(len, row)) == 1 else found

    def _count(self, candidate: Candidate, *, every_deal: bool = False) -> None:
        """Takes its plan if that is the best one."""
        if not every_deal:
            same = replace(candidate, seconds=0.0)
            if same in self._seen:
                return
            self._seen.add(same)
        found = self._counting.best(candidate, self._best_s, every_deal=every_deal)
        self._best = found or self._best

    # -- what promises most --------------------------------------------------------------------

    def _count_what_promises(self, first: Schedule) -> None:
        """With this schedule, or with more micro-batches under way where they are too few."""
        found: list[tuple[bool, float, int, RowPromises, ZeroStage, Schedule, int]] = []
        within = self._counting.work + PROMISING
        for row in self._rows[0]:
            promises = self._promises.of(row)
            for zero_stage in self._zero_stages(row, first):
                for schedule in dict.fromkeys((first, "eager-1f1b")):
                    if schedule not in self._schedules:
                        continue
                    of_row = promises.divided(zero_stage, schedule)
                    for at in np.flatnonzero(of_row.seconds * PESSIMISM < self._best_s):
                        seconds = float(of_row.seconds[at])
                        late = -(-self._batch // self._sizes[at]) * len(row) > PROMISING
                        found.append(
                            (late, seconds, len(found), promises, zero_stage, schedule, int(at))
                        )
                    if not of_row.waits.any():
                        break
        for _, seconds, _, promises, zero_stage, schedule, number in sorted(found):
            if self._counting.work > within:
                return
            if seconds * PESSIMISM > self._best_s:
                continue
            if candidate := promises.candidate(zero_stage, schedule, number):
                self._count(candidate)

    def _count_what_is_alike(self) -> None:
        before: Found | None = None
        while self._best is not None and self._best is not before:
            before = self._best
            for candidate in self._alike(before.candidate):
                if self._counting.work > ALIKE:
                    return
                self._count(candidate)

    def _alike(self, one: Candidate) -> Iterator[Candidate]:
        """What differs from it in one thing."""
        way, cut, promises = one.way, one.cut, self._promises.of(one.way.row)
        number = int(np.argmin(np.abs(np.array(self._sizes) - way.micro_batch)))
        others = [(way.schedule, n) for n in (number - 1, number + 1) if 0 <= n < len(self._sizes)]
        others += [(schedule, number) for schedule in self._schedules if schedule != way.schedule]
        for schedule, at in others:
            if one.zero_stage not in self._zero_stages(way.row, schedule):
                continue
            found = promises.candidate(one.zero_stage, schedule, at)
            if found is not None:
                yield found
        for place, end in enumerate(cut[:-1]):
            before = cut[place - 1] if place else 0
            for moved in (end - 1, end + 1):
                if before < moved < cut[place + 1]:
                    yield replace(one, cut=(*cut[:place], moved, *cut[place + 1 :]))
        for place, manner in enumerate(way.manners if len(way.manners) <= FEW_STAGES else ()):
            for other in self._manners_at(way.row, way.schedule, place):
                if other != manner and other.team == manner.team:
                    manners = (*way.manners[:place], other, *way.manners[place + 1 :])
                    yield replace(one, way=replace(way, manners=manners))

    def _manners_at(self, row: Row, schedule: Schedule, stage: int) -> tuple[Manner, ...]:
        last = stage == len(row) * rounds_of(schedule) - 1
        return self._manners.of(kind_of(row[stage % len(row)]), schedule, last=last)

    # -- that no other is faster ---------------------------------------------------------------

    @cached_property
    def _least_s(self) -> float:
        """No step of any plan is shorter."""
        classes = sorted(Counter(device.device_class for device in self._devices).items())
        modes = [Mode(recompute=again) for again in sorted(set(self._space.recompute))]
        return min(self._cutter.least_of(classes, size, modes) for size in self._sizes)

    def _prove(self) -> float:
        """Seconds that no step takes less than: where there are few ways, those of the best plan,
        which all candidates that may be faster were counted for."""
        if not self._few():
            return 0.0
        for candidate in self._nearest_first():
            if candidate.seconds >= self._best_s * (1 - ENOUGH):
                break
            if self._counting.work > ALL:
                return candidate.seconds
            self._count(candidate, every_deal=True)
        return self._best_s

    def _few(self) -> bool:
        """Whether there are few ways, and few cuts of each."""
        found, complete = self._rows
        if not complete:
            return False
        total, calls = 0, len(self._profile.model.calls)
        for row, schedule in product(found, self._schedules):
            stages = len(row) * rounds_of(schedule)
            manners = (len(self._manners_at(row, schedule, n)) for n in range(stages))
            total += len(self._sizes) * prod(manners)
            if total > FEW_WAYS or comb(calls - 1, stages - 1) > FEW_CUTS:
                return False
        return True

    def _ways(self) -> Iterator[Way]:
        for row, schedule in product(self._rows[0], self._schedules):
            stages = len(row) * rounds_of(schedule)
            if not self._zero_stages(row, schedule):
                continue
            every = [self._manners_at(row, schedule, n) for n in range(stages)]
            for manners in product(*every):
                teams = [manner.team for manner in manners]
                if teams == teams[: len(row)] * rounds_of(schedule):
                    yield from (Way(row, manners, schedule, size) for size in self._sizes)

    def _nearest_first(self) -> Iterator[Candidate]:
        """All candidates that have room for the units' state, those with the least time first."""
        heap: list[tuple[float, int, Candidate, Iterator[Candidate]]] = []
        for number, way in enumerate(self._ways()):
            others = self._cut(way)
            if (first := next(others, None)) is not None:
                heap.append((first.seconds, number, first, others))
        heapq.heapify(heap)
        while heap:
            _, number, candidate, others = heapq.heappop(heap)
            yield candidate
            if (following := next(others, None)) is not None:
                heapq.heappush(heap, (following.seconds, number, following, others))

    def _cut(self, way: Way) -> Iterator[Candidate]:
        cuts, stages = self._cutter.cuts(way), self._zero_stages(way.row, way.schedule)
        if not stages:
            return
        least = np.stack([self._cutter.least_s(way, cuts, zero_stage) for zero_stage in stages])
        # Of the same least time the lower ZeRO stage comes first.
        for place in np.argsort(least.T, axis=None, kind="stable"):
            number, row = divmod(int(place), len(stages))
            least_s = float(least[row, number])
            if least_s == float("inf"):
                return
            yield Candidate(least_s, way, stages[row], cuts.cut(number))
