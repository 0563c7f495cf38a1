"""The fastest plan of several stages: the groups, the calls, the micro-batches.

A *way* is a row of groups (`planner.pipeline_parallel.device_order`), a manner for each stage
(`planner.pipeline_parallel.stage_modes`), a schedule and a micro-batch size. All rows, with the
best cut and manners of each, are estimated at once (`planner.pipeline_parallel.pipeline_estimate`):
every row as if gradients were summed in no time, then the fastest rows at all ZeRO stages and by
all schedules. The fastest estimates are counted exactly
(`planner.pipeline_parallel.micro_batch_counts`), then the neighbors of the best plan: other
schedules, sizes, manners, and a call more or less in a stage.

With few ways, candidates are counted in the order of a lower bound, the computing of the busiest
worker and the time before and after (`planner.pipeline_parallel.stage_cuts`), until none can be
shorter than the best plan; a way is cut when the turn of its own bound comes. `bound_s` is the
least bound of everything not counted: the time of the plan itself, unless candidates, cuts,
micro-batch sizes or deals of micro-batches to workers are too many. Devices of one stage run in one
mode, and share its state as equally as room allows.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import comb, prod
from operator import itemgetter

import numpy as np

from gpumix.cost.memory_layout.curves import FloatArray
from gpumix.cost.peak_memory import compute_free_bytes, get_element_bytes
from gpumix.cost.predict import predict
from gpumix.planner.common.stage_preconditions import (
    Refusal,
    check_space_includes,
    check_stage_count,
    make_schedules_error,
    refuse_one_stage,
)
from gpumix.planner.common.strategy import PlanRequest, select_by_devices
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import UncutCandidate, get_stages_per_group
from gpumix.planner.pipeline_parallel.device_order import Row, get_device_place, list_rows
from gpumix.planner.pipeline_parallel.micro_batch_counts import (
    MIN_RELATIVE_GAIN,
    CandidateEvaluator,
    CutCandidate,
    FoundPlan,
    iterate_neighbor_deals,
)
from gpumix.planner.pipeline_parallel.pipeline_estimate import PipelineEstimates, RowEstimates
from gpumix.planner.pipeline_parallel.row_bounds import RowBounds
from gpumix.planner.pipeline_parallel.stage_cuts import FEW_CUTS, Cutter
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    StageMode,
    StageModes,
    get_group_kind,
    get_measured_tp_degrees,
    list_tp_degrees,
)
from gpumix.planner.pipeline_parallel.tensor_parallel_search import (
    select_groupable_devices,
)
from gpumix.schema.plan.plan import Plan, Schedule, ZeroStage
from gpumix.schema.profile.profile import Profile

FEW_SIZES = 12  # up to this many micro-batch sizes, all are tried
FEW_COUNTS = 4  # beyond, sizes making up to this many micro-batches are tried too
FEW_WAYS = 500  # up to this many, all are tried
SOME_WAYS = 1_200  # up to this many if all sizes are tried, with less work
FEW_STAGES = 8  # up to this many, manners are changed one by one
# Limits on exact counts, in actions replayed: of promising plans, and of neighbors in addition.
ESTIMATED_ACTIONS, NEIGHBOR_ACTIONS = 8_000, 8_000
# Limits on further counts, of all plans: with few ways, and with some.
PROOF_ACTIONS, PROOF_ACTIONS_SOME_WAYS = 32_000, 20_000
HOPELESS_AT = 0.15  # of the limit: a proof ends where twice as much would not do from here
# Work to cut a model, for each stage, in actions replayed; and the number of cuts adding 1.
CUT_WORK, CUTS_A_WORK = 3, 100
MOST_TOO_FULL = 2  # candidates without room for it all, of which neighbors are tried
FEW_DEVICES = 64  # beyond, a replay takes long: estimates are trusted more
# Least part of an estimate that a step takes, by devices: up to so many.
ESTIMATE_FRACTIONS = ((12, 0.9), (FEW_DEVICES, 0.95), (float("inf"), 0.97))
# Beyond so many rows, they are ranked at fewer cuts, by devices.
FEW_ROWS, COARSE_EDGES = ((12, 250), (float("inf"), 48)), 17
# Rows estimated by all schedules and ZeRO stages, by devices.
MOST_ROWS = ((12, 250), (float("inf"), 16))
LEAST_SIZES = 3  # at least, that are estimated, if they may be fast enough
SMALL_GROUP = 4  # devices, up to which a lower ZeRO stage may need less memory
NEAR = 1.4  # times the least time so far, for rows and sizes to estimate
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "eager-1f1b", "gpipe", "zero-bubble", "interleaved")

# True if slow to replay; seconds; a number; the row, the ZeRO stage, the schedule, the number of
# waves, and the number of the micro-batch size.
Estimated = tuple[bool, float, int, RowEstimates, tuple[ZeroStage, Schedule, int, int]]


class StageSearch:
    """Search of plans faster than `below_s`.

    Args:
        margin: factor of `below_s`: neighbors of plans within are tried too.
        proves: whether more is counted, if few, to prove that nothing is faster.
    """

    def __init__(
        self,
        profile: Profile,
        request: PlanRequest,
        below_s: float,
        *,
        margin: float = 1.0,
        proves: bool = True,
    ) -> None:
        self._proves, self._bounds = proves, request.bounds
        self._profile = profile
        self._batch = request.global_batch
        self._space = request.space
        self._devices = select_groupable_devices(profile, request)
        self._wanted_s, self._below_s = below_s, below_s * margin
        refuse_one_stage(profile, self._devices)
        check_space_includes(request.space)
        degrees = get_measured_tp_degrees(profile).intersection(list_tp_degrees(request.space))
        self._pace_of = pace_of = CallTimesCache(profile, {NO_TENSOR_PARALLEL, *degrees})
        self._manners = StageModes(pace_of.profiles, request.space)
        self._schedules = [one for one in SCHEDULES if one in request.space.pipeline_schedules]
        check_stage_count(
            request.space,
            most_groups=self._most_groups,
            units=profile.model.most_stages,
            rounds=max(map(get_stages_per_group, self._schedules)),
            degree=self._manners.get_smallest_tp_size(),
        )
        self._refuse_schedules()
        self._cutter = Cutter(pace_of, self._batch)
        self._counting = CandidateEvaluator(pace_of, self._batch)
        self._estimates = PipelineEstimates(pace_of, self._manners, self._batch, self._sizes)
        self._best: FoundPlan | None = None
        self._seen: set[CutCandidate] = set()

    def run(self) -> tuple[Plan | None, float]:
        """Return the fastest plan found, and the proven bound; see `plan_staged_below`."""
        bound_s = self._least_s
        if bound_s < self._best_s * (1 - MIN_RELATIVE_GAIN):
            self._count_estimated()
            self._evaluate_neighbors()
        self._drop_slow()
        if self._proves and bound_s < self._best_s * (1 - MIN_RELATIVE_GAIN):
            before = self._best
            bound_s = max(bound_s, self._prove())
            if self._best is not before:
                self._evaluate_neighbors()
        if self._bounds and bound_s < self._best_s < float("inf"):
            bound_s = max(bound_s, self._bound_rows())
        bound_s = min(bound_s, self._best_s)
        if self._best is None:
            if self._below_s == float("inf"):
                raise self._counting.misses.error(self._profile)
            return None, bound_s
        expected = predict(self._profile, self._best.plan)
        bound_s = min(bound_s, expected.step_s)
        expected = expected.model_copy(update={"bound_s": bound_s})
        return self._best.plan.model_copy(update={"prediction": expected}), bound_s

    def _drop_slow(self) -> None:
        """Return to the limit without the margin."""
        self._below_s = self._wanted_s
        if self._best is not None and self._best.seconds >= self._below_s:
            self._best = None

    def _refuse_schedules(self) -> None:
        """Drop schedules without plans; raise a NoFeasiblePlanError if none remains."""
        refused = {one: why for one in self._schedules if (why := self._refusal(one)) is not None}
        if len(refused) == len(self._schedules):
            raise make_schedules_error(refused)
        self._schedules = [one for one in self._schedules if one not in refused]

    def _refusal(self, schedule: Schedule) -> Refusal | None:
        """Return the reason why a schedule has no plan, if any."""
        rounds, space = get_stages_per_group(schedule), self._space
        if lacking := self._manners.find_refusal(self._classes, schedule):
            return lacking
        if any(self._zero_stages(row, schedule) for row in self._rows[0]):
            return None
        # Too few stages are allowed, or too few units exist.
        least = max(space.min_pipeline_stages, 2 * rounds)
        least = -(-least // rounds) * rounds
        if least > self._most_stages:
            pinned = space.max_pipeline_stages == self._most_stages
            pin = f"techniques.max_pipeline_stages is {space.max_pipeline_stages}"
            there = pin if pinned else f"the model has {self._most_stages} units"
            each = (
                f"{rounds} stages for each of 2 groups or more, so {least}" if rounds > 1 else least
            )
            return Refusal(
                f"it has {each} at least, and {there}",
                f"set techniques.max_pipeline_stages to {least} or more"
                if pinned
                else "allow `techniques: {pipeline_schedules: [1f1b, ...]}`",
            )
        return Refusal(
            f"no groups of devices make {self._wanted} stages",
            "allow another number of stages, or `techniques: {pipeline_schedules: [1f1b, ...]}`",
        )

    @property
    def _wanted(self) -> str:
        """The allowed numbers of stages, in words."""
        least, most = max(2, self._space.min_pipeline_stages), self._most_stages
        return f"{least}" if least == most else f"{least} to {most}"

    @cached_property
    def _pessimism(self) -> float:
        return select_by_devices(ESTIMATE_FRACTIONS, len(self._devices))

    @property
    def _best_s(self) -> float:
        return self._below_s if self._best is None else self._best.seconds

    @cached_property
    def _rows(self) -> tuple[list[Row], bool]:
        found, complete = list_rows(self._devices, min(self._most_stages, self._most_groups))
        if self._manners.get_smallest_tp_size() == 1:
            return found, complete
        able = [
            row
            for row in found
            if all(map(self._manners.can_form_tp_groups, map(get_group_kind, row)))
        ]
        return able, complete

    @cached_property
    def _most_groups(self) -> int:
        """The most groups of a row: each has at least a tensor-parallel group."""
        alike = Counter(map(get_device_place, self._devices))
        degree = self._manners.get_smallest_tp_size()
        return sum(count // degree for count in alike.values())

    @property
    def _most_stages(self) -> int:
        most = self._profile.model.most_stages
        return min(most, self._space.max_pipeline_stages or most)

    @cached_property
    def _classes(self) -> Counter[str]:
        """The number of devices of each class."""
        return Counter(device.device_class for device in self._devices)

    @cached_property
    def _largest(self) -> int:
        """The largest micro-batch measured on devices of every class."""
        limits = (self._manners.largest_of_class(name) for name in self._classes)
        return int(min(self._batch, *limits))

    @cached_property
    def _sizes(self) -> list[int]:
        """Micro-batch sizes to try: all of few; of many, sizes for few micro-batches, and some
        evenly spaced in the logarithm, each the smallest for its number of micro-batches."""
        if self._largest <= FEW_SIZES:
            return list(range(1, self._largest + 1))
        spread = np.geomspace(1, self._largest, FEW_SIZES).astype(np.int64)
        counts = np.union1d(-(-self._batch // spread), np.arange(1, FEW_COUNTS + 1))
        sizes = np.unique(-(-self._batch // counts))
        return [int(size) for size in sizes[sizes <= self._largest]]

    def _zero_stages(self, row: Row, schedule: Schedule) -> list[ZeroStage]:
        """Return the ZeRO stages for a row: only the lowest if each stage has one device, none if
        the schedule gives the row too many stages or too few."""
        if (
            not self._space.min_pipeline_stages
            <= len(row) * get_stages_per_group(schedule)
            <= self._most_stages
        ):
            return []
        found = sorted(set(self._space.zero_stages))
        return found[:1] if max(map(len, row)) == 1 else found

    def _count(self, candidate: CutCandidate) -> None:
        """Count a candidate, and keep the plan if best."""
        if candidate in self._seen:
            return
        self._seen.add(candidate)
        least_s = self._cutter.bound_cut(candidate.way, candidate.cut, candidate.zero_stage)
        if least_s < self._best_s * (1 - MIN_RELATIVE_GAIN) or self._best_s == float("inf"):
            self._best = self._counting.best(candidate, self._best_s) or self._best

    # -- the fastest by estimate -----------------------------------------------------------------

    def _count_estimated(self) -> None:
        """Count estimated plans; slow replays come last."""
        for _, seconds, _, of_row, choice in sorted(self._estimated()):
            if self._counting.work > ESTIMATED_ACTIONS:
                return
            if seconds * self._pessimism > self._best_s:
                continue
            if candidate := of_row.candidate(*choice):
                self._count(candidate)

    def _estimated(self) -> Iterator[Estimated]:
        """Yield estimated plans that may beat the best."""
        ideal = self._ideal_rows()
        if not ideal:
            return
        limit_s = self._best_s / self._pessimism
        least = np.min([seconds for seconds, _ in ideal], axis=0)
        near_s = NEAR * max(float(least.min()), float(np.sort(least)[:LEAST_SIZES][-1]))
        useful = least <= min(limit_s, near_s)
        sizes = [size for size, may in zip(self._sizes, useful) if may]
        estimates, found = self._estimates.with_sizes(sizes), 0
        for ideal_s, row in ideal:
            if ideal_s.min() > limit_s:
                return
            of_row = estimates.of(row)
            for zero_stage, waves in self._divisions(of_row):
                # 1f1b needs the least memory, and the ideal time is of any schedule.
                first = of_row.divided(zero_stage, "1f1b", waves)
                if first.ideal_s.min() > limit_s:
                    continue
                for schedule in self._schedules_of(row, zero_stage, waits=first.waits):
                    every_s = of_row.divided(zero_stage, schedule, waves).seconds
                    limit_s = min(limit_s, NEAR * float(every_s.min()))
                    for at in np.flatnonzero(every_s * self._pessimism < self._best_s):
                        late = -(-self._batch // sizes[at]) * len(row) > ESTIMATED_ACTIONS
                        found += 1
                        choice = zero_stage, schedule, waves, int(at)
                        yield late, float(every_s[at]), found, of_row, choice

    def _divisions(self, of_row: RowEstimates) -> Iterator[tuple[ZeroStage, int]]:
        """Yield the ZeRO stages and numbers of waves with room for a row."""
        stages = {z for one in self._schedules for z in self._zero_stages(of_row.row, one)}
        small = max(map(len, of_row.row)) <= SMALL_GROUP
        for zero_stage in sorted(stages, reverse=True):
            every = [
                n for n in of_row.waves(zero_stage) if of_row.divided(zero_stage, "1f1b", n).fits
            ]
            if not every and not small:
                return  # lower stages need more memory
            yield from ((zero_stage, n) for n in every)

    def _schedules_of(self, row: Row, zero_stage: ZeroStage, *, waits: bool) -> Iterator[Schedule]:
        """Yield the schedules to try for a row at a ZeRO stage: eager 1F1B only if 1F1B `waits` or
        is ruled out."""
        for schedule in self._schedules:
            as_another = schedule == "eager-1f1b" and "1f1b" in self._schedules and not waits
            if not as_another and zero_stage in self._zero_stages(row, schedule):
                yield schedule

    def _ideal_rows(self) -> list[tuple[FloatArray, Row]]:
        """Return the best rows with ideal seconds: sums hide behind computing and no gradients are
        late, at the highest ZeRO stage with room and by the schedule of least memory."""
        if not self._holds_state(max(self._space.zero_stages)):
            return []
        estimates, rows = self._estimates, self._rows[0]
        if len(rows) > select_by_devices(FEW_ROWS, len(self._devices)):
            estimates = PipelineEstimates(
                self._pace_of, self._manners, self._batch, self._sizes, COARSE_EDGES
            )
        found = []
        for row in rows:
            of_row = estimates.of(row)
            for zero_stage in self._zero_stages_of(row):
                divided = of_row.divided(zero_stage, "1f1b", 0)
                if divided.fits:
                    found.append((divided.ideal_s, row))
                    break
        most = int(select_by_devices(MOST_ROWS, len(self._devices)))
        return sorted(found, key=lambda one: float(one[0].min()))[:most]

    def _zero_stages_of(self, row: Row) -> list[ZeroStage]:
        """Return the ZeRO stages for a row by any schedule, the highest first. It keeps the least
        in large groups; in small ones its buffers may be larger than what it divides."""
        every = {z for one in self._schedules for z in self._zero_stages(row, one)}
        found = sorted(every, reverse=True)
        return found if max(map(len, row)) <= SMALL_GROUP else found[:1]

    def _holds_state(self, zero_stage: ZeroStage) -> bool:
        """Return True if all devices together have room for one copy of units called once."""
        calls = len(self._profile.model.calls)
        elements = self._pace_of.rooms[NO_TENSOR_PARALLEL].count_exclusive_elements(
            np.array(0), np.array(calls)
        )
        each = [
            get_element_bytes(self._profile, name, max(1, zero_stage))[1] for name in self._classes
        ]
        room = (n * compute_free_bytes(self._profile, name) for name, n in self._classes.items())
        return float(elements) * min(each) <= sum(room)

    def _evaluate_neighbors(self) -> None:
        """Count what differs in a single choice from the best plan, again from each better one, and
        from the fastest candidates that do not fit."""
        full, most_work = self._counting.too_full, self._counting.work + NEIGHBOR_ACTIONS
        for candidate in sorted(full, key=lambda one: full[one])[:MOST_TOO_FULL]:
            if full[candidate] < self._best_s:
                for other in self._alike(candidate):
                    if self._counting.work <= most_work:
                        self._count(other)
        before: FoundPlan | None = None
        while self._best is not None and self._best is not before:
            before = self._best
            for candidate in self._alike(before.candidate):
                if self._counting.work > most_work:
                    return
                self._count(candidate)

    def _alike(self, one: CutCandidate) -> Iterator[CutCandidate]:
        """Yield candidates differing in a single choice."""
        way, cut, of_row = one.way, one.cut, self._estimates.of(one.way.row)
        allowed = set(self._profile.model.cuts)
        number = int(np.argmin(np.abs(np.array(self._sizes) - way.micro_batch)))
        others = [(way.schedule, n) for n in (number - 1, number + 1) if 0 <= n < len(self._sizes)]
        others += [(schedule, number) for schedule in self._schedules if schedule != way.schedule]
        for schedule, at in others:
            if one.zero_stage not in self._zero_stages(way.row, schedule):
                continue
            waves = 0 if one.zero_stage < 2 else one.waves or 1
            found = of_row.candidate(one.zero_stage, schedule, waves, at)
            if found is not None:
                yield found
        for place, end in enumerate(cut[:-1]):
            before = cut[place - 1] if place else 0
            for moved in (end - 1, end + 1):
                if before < moved < cut[place + 1] and moved in allowed:
                    yield replace(one, cut=(*cut[:place], moved, *cut[place + 1 :]), deal=None)
        for place, manner in enumerate(way.manners if len(way.manners) <= FEW_STAGES else ()):
            for other in self._manners_at(way.row, way.schedule, place):
                if other != manner and other.tp == manner.tp:
                    manners = (*way.manners[:place], other, *way.manners[place + 1 :])
                    yield replace(one, way=replace(way, manners=manners), deal=None)
        yield from iterate_neighbor_deals(one)

    def _manners_at(self, row: Row, schedule: Schedule, stage: int) -> tuple[StageMode, ...]:
        last = stage == len(row) * get_stages_per_group(schedule) - 1
        return self._manners.of(get_group_kind(row[stage % len(row)]), schedule, last=last)

    # -- proof that no plan is faster ------------------------------------------------------------

    @cached_property
    def _least_s(self) -> float:
        """A lower bound of the step of any plan."""
        return self._cutter.bound_all_plans(sorted(self._classes.items()), self._manners)

    def _prove(self) -> float:
        """Return a lower bound of all steps in seconds. With few ways, all candidates that may beat
        the best plan are counted; the rest, with too many cuts, sizes or deals, is bounded."""
        allowed = self._allowed_work()
        if not allowed:
            return 0.0
        begun, most_work = self._counting.work, self._counting.work + allowed
        least_s = float("inf") if self._every_size else self._least_s  # of everything not counted
        first_s: float | None = None
        for own_least_s, candidate in self._search_by_limits(most_work):
            if own_least_s >= self._best_s * (1 - MIN_RELATIVE_GAIN):
                break
            first_s = own_least_s if first_s is None else first_s
            used = (self._counting.work - begun) / allowed
            done = (own_least_s - first_s) / (self._best_s - first_s)
            hopeless = len(self._devices) > 2 and used > HOPELESS_AT and done < used / 2
            if used > 1 or hopeless:
                return min(least_s, own_least_s)
            if candidate is None:
                least_s = min(least_s, own_least_s)
                continue
            found, complete = self._counting.best_deal(candidate, self._best_s)
            self._best = found or self._best
            if not complete:
                least_s = min(least_s, own_least_s)
        return least_s

    @property
    def _every_size(self) -> bool:
        return len(self._sizes) == self._largest

    def _bound_rows(self) -> float:
        """Return a lower bound of the steps of all rows that are looked at, in all sizes."""
        interleaved = "interleaved" in self._schedules
        if not RowBounds.can_bound(self._profile.model, interleaved=interleaved):
            return 0.0
        bounds = RowBounds(
            self._pace_of,
            self._manners,
            self._batch,
            self._sizes,
            self._best_s,
            interleaved=interleaved,
        )
        return bounds.least_s(self._rows[0])

    def _allowed_work(self) -> int:
        """Return the work allowed for looking at all ways; 0 if the ways are too many."""
        found, complete = self._rows
        if not complete:
            return 0
        total, most = 0, SOME_WAYS if self._every_size else FEW_WAYS
        for row, schedule in product(found, self._schedules):
            stages = len(row) * get_stages_per_group(schedule)
            manners = (len(self._manners_at(row, schedule, n)) for n in range(stages))
            total += len(self._sizes) * prod(manners)
            if total > most:
                return 0
        return PROOF_ACTIONS if total <= FEW_WAYS else PROOF_ACTIONS_SOME_WAYS

    def _ways(self) -> Iterator[tuple[float, UncutCandidate]]:
        """Yield ways that may beat the best plan, with lower bounds."""
        for row, schedule in product(self._rows[0], self._schedules):
            stages = len(row) * get_stages_per_group(schedule)
            if not self._zero_stages(row, schedule):
                continue
            every = [self._manners_at(row, schedule, n) for n in range(stages)]
            for manners in product(*every):
                degrees = [manner.tp for manner in manners]
                if degrees != degrees[: len(row)] * get_stages_per_group(schedule):
                    continue
                largest = min(map(self._manners.largest, map(get_group_kind, row), degrees))
                least = self._cutter.bound_row(row, manners, self._sizes)
                for size, least_s in zip(self._sizes, least):
                    if size <= largest and least_s < self._best_s * (1 - MIN_RELATIVE_GAIN):
                        yield float(least_s), UncutCandidate(row, manners, schedule, size)

    def _search_by_limits(self, most_work: int) -> Iterator[tuple[float, CutCandidate | None]]:
        """Yield candidates with room for the state of units, by lower bound, the least first. None
        stands for a way with too many cuts, or with its turn after `most_work`."""
        # A way is cut when its turn comes; its next candidate follows the last.
        heap: list[tuple[float, int, CutCandidate, Iterator[tuple[float, CutCandidate]]]] = []
        ways = sorted(self._ways(), key=itemgetter(0))
        cuts = len(self._profile.model.cuts)

        def put(number: int, others: Iterator[tuple[float, CutCandidate]]) -> None:
            for least_s, candidate in others:
                heapq.heappush(heap, (least_s, number, candidate, others))
                return

        def due(until_s: float) -> Iterator[tuple[float, CutCandidate]]:
            while heap and heap[0][0] <= until_s:
                least_s, number, candidate, others = heapq.heappop(heap)
                yield least_s, candidate
                put(number, others)

        for number, (way_s, way) in enumerate(ways):
            yield from due(way_s)
            every = comb(cuts, len(way.stages) - 1)
            if every > FEW_CUTS or self._counting.work > most_work:
                yield way_s, None
            else:
                self._counting.work += len(way.stages) * (CUT_WORK + every // CUTS_A_WORK)
                put(number, self._cut(way, way_s))
        yield from due(float("inf"))

    def _cut(self, way: UncutCandidate, way_s: float) -> Iterator[tuple[float, CutCandidate]]:
        """Yield a way's candidates by lower bound, at least `way_s` each."""
        cuts, stages = self._cutter.cuts(way), self._zero_stages(way.row, way.schedule)
        if not stages:
            return
        least = np.stack([self._cutter.least_s(way, cuts, zero_stage) for zero_stage in stages])
        # On ties, the lower ZeRO stage comes first.
        for place in np.argsort(least.T, axis=None, kind="stable"):
            number, row = divmod(int(place), len(stages))
            least_s = float(least[row, number])
            if least_s == float("inf"):
                return
            yield max(way_s, least_s), CutCandidate(way, stages[row], cuts.cut(number))
