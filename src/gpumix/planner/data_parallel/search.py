"""The fastest plan of one stage: samples, micro-batches, modes and state shares decided together.

Devices of one class are interchangeable, so the unknowns are how many devices of a class take which
option. Every setting (ZeRO stage, pools, form of the collectives) is searched within the time of
the best so far. The first is searched near the least possible time, which leaves few options. If
many remain, a search with few micro-batch sizes comes first and bounds the options worth
tabulating. The result is exact for the cost model in `gpumix.cost`, down to the rounding of a cut
to whole elements, except for the stated gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpumix.cost.memory_layout.curves import IntArray
from gpumix.planner.common.device_pool import (
    FEW_CLASSES,
    Fleet,
    iterate_smaller_fleets,
    select_classes,
)
from gpumix.planner.common.sharding_setting import (
    ShardingSetting,
    iterate_settings,
    relax_settings,
)
from gpumix.planner.common.strategy import (
    PlanRequest,
    build_plan,
    get_prediction,
    list_devices_by_rank,
)
from gpumix.planner.data_parallel.balance import assign_parts
from gpumix.planner.data_parallel.branch_and_bound import (
    EXACT_GAP,
    SampleLimits,
    find_fastest_choice,
)
from gpumix.planner.data_parallel.class_options import (
    TOLERANCE,
    OptionTable,
    PoolOptions,
    TimeBounds,
    list_corner_sizes,
    list_pool_options,
    tabulate,
)
from gpumix.planner.data_parallel.feasibility import FeasibilityTest, may_select
from gpumix.planner.data_parallel.no_fit_error import make_no_fit_error
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan, ZeroStage
from gpumix.schema.profile.profile import Profile

FEW_CELLS = 96 * 96  # samples x micro-batches of a class, up to which all are tabulated at once
FEW_SIZES = 24  # beyond, this many micro-batch sizes come first
SMALL_SIZES = 96  # all tried where memory is short
EXACT_SIZES, LARGE_SIZES = 512, 128  # all sizes up to the first are tried, and this many beyond

TIME_LIMIT_FACTORS = (1.1, 2.0, 8.0)  # times the least seconds of the passes
FEW_DEVICES = 64  # up to this many the answer is exact
LARGE_GAP = 5e-4  # beyond, no plan is faster by more than this fraction


@dataclass(frozen=True)
class Solution:
    """The fastest choice in a setting, with the pools searched, and seconds no choice changes."""

    setting: ShardingSetting
    pools: tuple[PoolOptions, ...]
    choice: SampleLimits
    fixed_s: float

    @property
    def step_s(self) -> float:
        return self.fixed_s + self.choice.limits.total_s

    @property
    def bound_s(self) -> float:
        return self.fixed_s + self.choice.bound_s


def plan_one_stage(profile: Profile, request: PlanRequest, paces: TimeBounds | None = None) -> Plan:
    """Return the plan with the shortest step within the request's space.

    Ties go to the plan with the least memory: the highest ZeRO stage. Where links are stated,
    devices may be left out, in large clusters classes and hosts: the rest may be linked better.

    Args:
        paces: of these classes, this batch and space; may be shared between searches.

    Raises:
        InputError: the request names devices unknown to the profile.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
    """
    batch = request.global_batch
    plan = plan_one_stage_below(profile, request, paces or TimeBounds(profile, batch), float("inf"))
    if plan is None:
        raise make_no_fit_error(
            profile, list_devices_by_rank(profile, request), request.space, batch
        )
    return plan


def plan_one_stage_below(
    profile: Profile,
    request: PlanRequest,
    paces: TimeBounds,
    below_s: float,
    *,
    waves: float = 1.0,
) -> Plan | None:
    """Return the optimal plan; None if nothing fits, or everything takes longer than `below_s`.

    Args:
        waves: waves of a step, of which this plan is for one. `below_s` and the plan's bound are
            then seconds of a wave on average; its other predictions, of this wave alone.

    Raises:
        InputError: the request names devices unknown to the profile.
    """
    best = _FleetSearch(paces, below_s)
    best.of(Fleet.of(profile, list_devices_by_rank(profile, request), waves), request.space)
    if best.solution is None:
        return None
    return _plan(best.solution, request.global_batch, best.bound_s)


def compute_least_step_s(
    profile: Profile, request: PlanRequest, paces: TimeBounds, below_s: float = float("inf")
) -> float | None:
    """Return the step seconds of `optimal`, without the plan; None if nothing fits in `below_s`.

    Args:
        paces: of these classes, this batch and space; may be shared between searches.

    Raises:
        InputError: the request names devices unknown to the profile.
    """
    best = _FleetSearch(paces, below_s)
    best.of(Fleet.of(profile, list_devices_by_rank(profile, request)), request.space)
    return None if best.solution is None else best.solution.step_s


class _FleetSearch:
    """The fastest choice of all settings tried, and the lower bound of all."""

    def __init__(self, paces: TimeBounds, below_s: float) -> None:
        self.solution: Solution | None = None
        self.bound_s = float("inf")
        self._place = 0  # of the solution among all settings
        self._places = 0  # settings so far
        self._speeds: dict[str, float] = {}
        # Settings of all devices in which a device differs, with state in any place.
        self._kinds: dict[ZeroStage, ShardingSetting] = {}
        self._paces = paces
        self._feasibility = FeasibilityTest(paces.batch)
        self._below_s = below_s  # slower choices do not count

    def of(self, everything: Fleet, space: Space) -> None:
        """Try all settings of all devices; then of fewer, going on from each faster fleet."""
        base, complete = everything, space.leave_out is False
        many = len(everything.classes) > FEW_CLASSES and everything.has_stated_links
        if many and not complete:
            base = self._leave_slowest_out(everything, space)
        else:
            self._try(everything, space)
        while not complete:
            before = self.solution
            some, complete = iterate_smaller_fleets(base)
            within = space if complete else _narrow(space, before)
            for fleet in some:
                if not self._too_slow(fleet):
                    self._try(fleet, within)
            if self.solution is None or self.solution is before:
                return
            base = self.solution.setting.fleet
            if within is not space:
                self._try(base, space)

    def _leave_slowest_out(self, everything: Fleet, space: Space) -> Fleet:
        """Try the fastest class, the two fastest, and so on, up to all; return the fastest fleet.
        Slow classes come late: by then most fleets with them are known to be too slow."""
        self._make_searches(everything, space)
        names = sorted(everything.classes, key=lambda name: (self._speed(name), name))
        for count in reversed(range(len(names))):
            fleet = everything.only(select_classes(everything.on_host, frozenset(names[count:])))
            if not self._too_slow(fleet):
                self._try(fleet, space)
        return everything if self.solution is None else self.solution.setting.fleet

    def _too_slow(self, fleet: Fleet) -> bool:
        """Return True if the devices cannot compute the batch in time."""
        speed = sum(len(devices) * self._speed(name) for name, devices in fleet.classes.items())
        if speed > 0 and self._paces.batch / speed > self._step_s:
            return True
        most = (len(devices) * self._most_samples(name) for name, devices in fleet.classes.items())
        return sum(most) < self._paces.batch

    def _speed(self, name: str) -> float:
        """Return the most samples a second of a device, over any links; infinite if unknown."""
        if name not in self._speeds:
            every = (self._paces.speed(one, name) for one in self._kinds_of(name))
            self._speeds[name] = max(every, default=0.0 if self._kinds else float("inf"))
        return self._speeds[name]

    def _most_samples(self, name: str) -> int:
        """Return an upper bound of a device's samples in a step that is fast enough."""
        paces, step_s = self._paces, self._step_s
        every = (paces.most_samples_alone(one, name, step_s) for one in self._kinds_of(name))
        return max(every, default=paces.batch)

    def _kinds_of(self, name: str) -> list[ShardingSetting]:
        return [setting for setting in self._kinds.values() if setting.modes[name]]

    def _try(self, fleet: Fleet, space: Space) -> None:
        """Try the settings of a fleet, the most promising first, until none can be faster."""
        searches = self._make_searches(fleet, space)
        first, self._places = self._places, self._places + len(searches)
        least = [search.least_s for search in searches]
        relaxations = _relax(searches)
        for number in sorted(range(len(searches)), key=lambda n: (least[n], n)):
            place, below_s = first + number, self._step_s * (1.0 + TOLERANCE)
            if least[number] == float("inf") or least[number] > below_s:
                break
            if any(one.is_slower(below_s) for one in relaxations[number]):
                continue
            # Of equally fast settings the earliest is kept, whichever rounding puts first.
            found = searches[number].solve(below_s if place < self._place else self._step_s)
            if found is not None:
                self.bound_s = min(self.bound_s, found.bound_s)
                self._take(found, place)

    def _make_searches(self, fleet: Fleet, space: Space) -> list[_Search]:
        """Return the searches of a fleet's settings that may be fast enough."""
        shared: dict[object, _SharedBounds] = {}

        def search(setting: ShardingSetting) -> _Search:
            places = setting.on_host, setting.on_either, setting.parameters_on
            key = setting.zero_stage, setting.sharding, *places
            if key not in shared:
                shared[key] = _SharedBounds(setting, self._paces)
            return _Search(setting, shared[key], self._feasibility)

        def is_worthwhile(setting: ShardingSetting) -> bool:
            self._kinds.setdefault(setting.zero_stage, setting)
            return search(setting).least_s <= self._step_s * (1.0 + TOLERANCE)

        return [search(setting) for setting in iterate_settings(fleet, space, is_worthwhile)]

    @property
    def _step_s(self) -> float:
        return self._below_s if self.solution is None else self.solution.step_s

    def _take(self, found: Solution, place: int) -> None:
        """Keep a solution if faster, or as fast and of an earlier setting."""
        limit = self._step_s * (1.0 - TOLERANCE)
        if found.step_s > limit and place < self._place:
            limit = self._step_s * (1.0 + TOLERANCE)
        if self.solution is None or found.step_s <= limit:
            self.solution, self._place = found, place


def _narrow(space: Space, solution: Solution | None) -> Space:
    """Return the space with the ZeRO stage and sharding of a solution, if there is one: with fewer
    devices others are hardly ever faster."""
    if solution is None:
        return space
    setting = solution.setting
    update = {"zero_stages": (setting.zero_stage,), "shardings": (setting.sharding,)}
    return space.model_copy(update=update)


class _Search:
    """The search for the fastest choice in a setting."""

    def __init__(
        self, setting: ShardingSetting, shared: _SharedBounds, feasibility: FeasibilityTest
    ) -> None:
        self.setting = setting
        self.shared = shared
        self.paces = shared.paces
        self.batch = self.paces.batch
        self.feasibility = feasibility
        self._most_s = float("inf")  # of a worthwhile choice
        self.gap = EXACT_GAP if setting.fleet.size <= FEW_DEVICES else LARGE_GAP

    @cached_property
    def least_s(self) -> float:
        """A lower bound of the step in this setting; infinite if a class can do nothing."""
        if self.shared.lacks_modes:
            return float("inf")
        return self._fixed_s + self._least_passes_s + self.shared.least_update_s

    def solve(self, below_s: float) -> Solution | None:
        """Return the fastest choice; None if none fits, or all take longer than `below_s`."""
        if not self.paces.can_compute_batch(self.setting, below_s - self._fixed_s):
            return None
        if below_s == float("inf") and not self.feasibility.can_hold_state(self.setting):
            return None
        found = self._search_by_limits(below_s - self._fixed_s)
        return None if found is None else Solution(self.setting, *found, self._fixed_s)

    @cached_property
    def _fixed_s(self) -> float:
        return self.setting.exposed_s + self.shared.fixed_update_s

    @property
    def _least_passes_s(self) -> float:
        """A lower bound of the passes: all devices at their best, or collectives alone."""
        return max(sum(self.setting.links.idle_pass_s), self.batch / self.shared.samples_per_s)

    def _search_by_limits(self, within_s: float) -> PoolChoice | None:
        """Return the fastest choice with passes of at most `within_s`.

        Limits near the least time come first, since few options remain; and few sizes first if many
        options remain even so. A choice among all sizes that takes no longer than the limit of its
        search is the fastest of all: any faster choice was in the tables too. If none of few sizes
        fits, all small sizes are tried too: memory is short, and large sizes take more.
        """
        largest = max(self._largest.values())
        every, self._most_s = self._every(largest), within_s
        if within_s < float("inf") and self._cells(within_s) <= FEW_CELLS:
            return self._among(every, within_s)
        least = self._least_passes_s
        limits = [least * factor for factor in TIME_LIMIT_FACTORS if 0 < least * factor < within_s]
        limits.append(within_s)
        for limit in limits:
            sizes = every if self._cells(limit) <= FEW_CELLS else _list_few_sizes(largest)
            found = self._among(sizes, limit)
            if found is None:
                if limit == limits[0] and not self.feasibility.can_fit(self.setting):
                    return None
                continue
            total = found[1].limits.total_s
            if sizes is every and total <= limit:
                return found
            return self._among(every, min(within_s, total * (1.0 + TOLERANCE)))
        if sizes is every:
            return None
        if within_s < float("inf"):
            return self._among(every, within_s)
        if self.setting.memory.is_size_one_smallest(self.batch):
            return None
        found = self._among(np.union1d(every[:SMALL_SIZES], _list_few_sizes(largest)), within_s)
        return found and self._among(every, found[1].limits.total_s * (1.0 + TOLERANCE))

    def _every(self, largest: int) -> IntArray:
        """Return all micro-batch sizes; of large sizes only some, each a little larger than the
        last (a sample more or less makes no difference), and the points of curves."""
        if largest <= EXACT_SIZES:
            return np.arange(1, largest + 1)
        steps = np.geomspace(EXACT_SIZES, largest, LARGE_SIZES).astype(np.int64)
        classes = self.setting.classes
        points = {
            n for name in classes for n in list_corner_sizes(self.setting.profile, name, largest)
        }
        exact = np.arange(1, EXACT_SIZES + 1)
        return np.unique(np.concatenate([exact, steps, _list_few_sizes(largest), sorted(points)]))

    @cached_property
    def _largest(self) -> dict[str, int]:
        """The largest micro-batch of each class with room."""
        return {n: self.paces.largest_micro_batch(self.setting, n) for n in self.setting.classes}

    def _cells(self, within_s: float) -> int:
        """Return an upper bound of the options of a class within `within_s`, in each mode."""
        most = self._most_samples(within_s)
        rows = {name: n + 1 - self._least_samples(most, name) for name, n in most.items()}
        return max(rows[name] * min(self._largest[name], n) for name, n in most.items())

    def _most_samples(self, within_s: float) -> dict[str, int]:
        """Return an upper bound of a device's samples within `within_s`, by class."""
        classes = self.setting.classes
        return {name: self.paces.most_samples(self.setting, name, within_s) for name in classes}

    def _least_samples(self, most: Mapping[str, int], name: str) -> int:
        """Return the fewest samples of a device of class `name` if none does more than `most`."""
        reached = sum(len(ds) * most[n] for n, ds in self.setting.classes.items())
        return max(0, self.batch - reached + most[name])

    def _among(self, sizes: IntArray, within_s: float) -> PoolChoice | None:
        """Return the fastest choice among micro-batches of `sizes`."""
        if within_s < 0:
            return None
        setting, classes = self.setting, self.setting.classes
        most = self._most_samples(within_s)
        tables: dict[str, OptionTable] = {}
        # Classes that may prove the batch too large with the fewest options come first.
        for name in sorted(classes, key=lambda n: (-len(classes[n]) * most[n], n)):
            largest = max(1, min(self._largest[name], most[name]))
            least = self._least_samples(most, name)
            if least > most[name]:
                return None
            grid = self.paces.grids.of(least, most[name], sizes[sizes <= largest])
            tables[name] = tabulate(setting, name, grid, within_s)
            most[name] = tables[name].most_samples
            if most[name] < 0:
                return None
        pools = self._build_pools(tables, thinned=False)
        if not may_select(pools, self.batch):
            return None
        pools = self._build_pools(tables, thinned=True)
        choice = find_fastest_choice(pools, self.batch, self.gap, self._most_s)
        return None if choice is None else (pools, choice)

    def _build_pools(
        self, tables: Mapping[str, OptionTable], *, thinned: bool
    ) -> tuple[PoolOptions, ...]:
        options = {name: table.list_options(thinned=thinned) for name, table in tables.items()}
        return list_pool_options(self.setting, options)


PoolChoice = tuple[tuple[PoolOptions, ...], SampleLimits]


class _SharedBounds:
    """Bounds that settings share which differ in the form of their collectives only."""

    def __init__(self, setting: ShardingSetting, paces: TimeBounds) -> None:
        self.setting = setting
        self.paces = paces

    @cached_property
    def lacks_modes(self) -> bool:
        """True if a class can do nothing."""
        return not all(self.setting.modes[name] for name in self.setting.classes)

    @cached_property
    def samples_per_s(self) -> float:
        """The most samples a second of all devices."""
        return self.paces.samples_per_s(self.setting)

    @cached_property
    def fixed_update_s(self) -> float:
        """Seconds of the update without sharding: every device updates everything."""
        if self.setting.zero_stage > 0:
            return 0.0
        return max(self.paces.update_s(self.setting, name) for name in self.setting.classes)

    @cached_property
    def least_update_s(self) -> float:
        """The least update: a pool's devices update at once, and the slowest pool counts."""
        if self.setting.zero_stage == 0:
            return 0.0
        longest = 0.0
        for pool in self.setting.pools:
            needed = [
                (len(there[0]), self.paces.update_s(self.setting, name))
                for name, there in pool.classes
            ]
            if all(update_s > 0 for _, update_s in needed):
                longest = max(longest, 1.0 / sum(n / update_s for n, update_s in needed))
        return longest


class _Relaxation:
    """A bound of several searches: the search of a setting in which no plan takes longer."""

    def __init__(self, searches: Sequence[_Search]) -> None:
        self._searches = searches
        self._bound_s = 0.0

    def is_slower(self, than_s: float) -> bool:
        """Return True if all settings are proven to take longer."""
        if than_s == float("inf"):
            return False
        if not self._bound_s:
            one = self._searches[0]
            relaxed = relax_settings([search.setting for search in self._searches])
            bounds = _SharedBounds(relaxed, one.paces)
            found = _Search(relaxed, bounds, one.feasibility).solve(than_s)
            self._bound_s = float("inf") if found is None else found.bound_s
        return self._bound_s > than_s


def _relax(searches: Sequence[_Search]) -> list[list[_Relaxation]]:
    """Return the relaxations of each search: of all with its ZeRO stage and sharding; then of those
    with the same places of state, or with the same collectives, whichever are fewer."""
    kinds: dict[object, list[int]] = {}
    for number, search in enumerate(searches):
        one = search.setting
        key = one.zero_stage, one.sharding, one.parameters_on
        kinds.setdefault(key, []).append(number)
    found: list[list[_Relaxation]] = [[] for _ in searches]
    for alike in kinds.values():
        by_place: dict[object, list[int]] = {}
        by_form: dict[object, list[int]] = {}
        for number in alike:
            one = searches[number].setting
            by_place.setdefault(one.on_host, []).append(number)
            by_form.setdefault((one.cap, one.collectives), []).append(number)
        for group in (alike, *min(by_place, by_form, key=len).values()):
            if len(group) > 1 and (group is alike or len(group) < len(alike)):
                relaxation = _Relaxation([searches[number] for number in group])
                for number in group:
                    found[number].append(relaxation)
    return found


def _list_few_sizes(largest: int) -> IntArray:
    """Return micro-batch sizes up to `largest`, evenly spaced in the logarithm."""
    return np.unique(np.geomspace(1, largest, FEW_SIZES).astype(np.int64))


def _plan(solution: Solution, batch: int, bound_s: float) -> Plan:
    """Build the plan of a solution, counted again without shortcuts."""
    plan = build_plan(
        solution.setting,
        strategy="optimal",
        global_batch=batch,
        parts=assign_parts(solution.setting, solution.pools, solution.choice, batch),
        bound_s=bound_s,
    )
    for worker in get_prediction(plan).workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes, worker
    return plan
