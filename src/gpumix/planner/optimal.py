"""The fastest plan: samples, micro-batches, modes and state shares decided together.

Devices of one class are interchangeable, so the unknowns are how many devices of a class take
which option. Every setting (ZeRO stage, pools, form of the collectives) is searched, within the
time of the best so far. The first is searched near the least time that there can be, which leaves
few options; where there are many even so, first with few micro-batch sizes, whose answer bounds
what is worth tabulating. The result is exact for the cost model in `gpumix.cost`, down to the
rounding of a cut to whole elements, but for the gap that it states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpumix.cost.curves import IntArray
from gpumix.cost.time import exposed_seconds
from gpumix.planner.balance import parts
from gpumix.planner.base import PlanRequest, assemble, predicted, ranked_devices
from gpumix.planner.fleet import Fleet, fewer
from gpumix.planner.options import (
    TOLERANCE,
    ClassOptions,
    Paces,
    PoolOptions,
    corners,
    pool_options,
    tabulate,
)
from gpumix.planner.room import may_fit
from gpumix.planner.search import IMPROVEMENT, Choice, fastest
from gpumix.planner.setting import Setting, settings
from gpumix.planner.shortage import no_room
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.space import Space

FEW_CELLS = 96 * 96  # samples x micro-batches of a class: so many are tabulated at once
FEW_SIZES = 24  # beyond, so many micro-batch sizes come first
SMALL_SIZES = 96  # that are all tried where there is little room
EXACT_SIZES, LARGE_SIZES = 512, 128  # all up to the first are tried, and so many beyond

NEAR = (1.1, 2.0, 8.0)  # times the least that the passes can take
FEW_DEVICES = 64  # up to this many the answer is exact
LARGE_GAP = 5e-4  # beyond, no plan is faster by more than this part


@dataclass(frozen=True)
class Solution:
    """The fastest choice in one setting, the pools that it was chosen for, and what it adds to:
    the seconds that no choice changes."""

    setting: Setting
    pools: tuple[PoolOptions, ...]
    choice: Choice
    fixed_s: float

    @property
    def step_s(self) -> float:
        return self.fixed_s + self.choice.limits.total_s

    @property
    def bound_s(self) -> float:
        return self.fixed_s + self.choice.bound_s


def optimal(profile: Profile, request: PlanRequest, paces: Paces | None = None) -> Plan:
    """The plan with the shortest step of all that the request's space allows.

    Of plans that are equally fast the one wins that needs the least memory: the highest ZeRO stage.
    Where links are stated devices may be left out, in large clusters whole classes and hosts: the
    others may be linked better.

    Args:
        paces: of these classes, this batch and space; other searches of them may share them.

    Raises:
        InputError: the request names devices that the profile does not know.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
    """
    batch = request.global_batch
    plan = optimal_below(profile, request, paces or Paces(profile, batch), float("inf"))
    if plan is None:
        raise no_room(profile, ranked_devices(profile, request), request.space, batch)
    return plan


def optimal_below(
    profile: Profile, request: PlanRequest, paces: Paces, below_s: float
) -> Plan | None:
    """The same; None if nothing fits, or all takes longer than `below_s`.

    Raises:
        InputError: the request names devices that the profile does not know.
    """
    best = _Best(paces, below_s)
    best.of(Fleet.of(profile, ranked_devices(profile, request)), request.space)
    if best.solution is None:
        return None
    return _plan(best.solution, request.global_batch, best.bound_s)


def least_step_s(
    profile: Profile, request: PlanRequest, paces: Paces, below_s: float = float("inf")
) -> float | None:
    """Seconds of the step of `optimal`, without the plan; None if nothing fits, or all takes longer
    than `below_s`.

    Args:
        paces: of these classes, this batch and space; other searches of them may share them.

    Raises:
        InputError: the request names devices that the profile does not know.
    """
    best = _Best(paces, below_s)
    best.of(Fleet.of(profile, ranked_devices(profile, request)), request.space)
    return None if best.solution is None else best.solution.step_s


class _Best:
    """The fastest choice of all settings that were tried, and what bounds all of them."""

    def __init__(self, paces: Paces, below_s: float) -> None:
        self.solution: Solution | None = None
        self.bound_s = float("inf")
        self._place = 0  # of the solution among all settings
        self._places = 0  # settings so far
        self._speeds: dict[str, float] = {}  # samples a second of a device, over any links
        self._paces = paces
        self._below_s = below_s  # what takes longer is of no interest

    def of(self, everything: Fleet, space: Space) -> None:
        """Try all settings of all devices; then of fewer ones, of which those that are faster are
        where to go on from."""
        self._try(everything, space)
        base, complete = everything, space.leave_out is False
        while not complete:
            before = self.solution
            some, complete = fewer(base)
            for fleet in some:
                if not self._too_slow(fleet):
                    self._try(fleet, space)
            if self.solution is None or self.solution is before:
                return
            base = self.solution.setting.fleet

    def _too_slow(self, fleet: Fleet) -> bool:
        """Whether these devices cannot compute the batch in time."""
        unknown = float("inf")  # a class that could do nothing beside the others
        speed = sum(len(ds) * self._speeds.get(n, unknown) for n, ds in fleet.classes.items())
        return speed > 0 and self._paces.batch / speed > self._step_s

    def _try(self, fleet: Fleet, space: Space) -> None:
        """All settings of one fleet, those first that promise most, until no other is faster."""
        searches = [_Search(setting, self._paces) for setting in settings(fleet, space)]
        if not self._speeds.keys() >= fleet.classes.keys():
            self._speeds |= _speeds(searches)
        first, self._places = self._places, self._places + len(searches)
        least = [search.least_s for search in searches]
        for number in sorted(range(len(searches)), key=lambda n: (least[n], n)):
            below_s = self._step_s
            if least[number] == float("inf") or least[number] > below_s * (1.0 + TOLERANCE):
                break
            found = searches[number].solve(below_s)
            if found is not None:
                self.bound_s = min(self.bound_s, found.bound_s)
                self._take(found, first + number)

    @property
    def _step_s(self) -> float:
        return self._below_s if self.solution is None else self.solution.step_s

    def _take(self, found: Solution, place: int) -> None:
        """Keep it if it is faster, or as fast and of a setting that comes first."""
        limit = self._step_s * (1.0 - TOLERANCE)
        if found.step_s > limit and place < self._place:
            limit = self._step_s * (1.0 + TOLERANCE)
        if self.solution is None or found.step_s <= limit:
            self.solution, self._place = found, place


class _Search:
    """The search for the fastest choice in one setting."""

    def __init__(self, setting: Setting, paces: Paces) -> None:
        self.setting = setting
        self.batch = paces.batch
        self.paces = paces
        self.gap = IMPROVEMENT if setting.fleet.size <= FEW_DEVICES else LARGE_GAP

    @cached_property
    def least_s(self) -> float:
        """No choice of this setting takes less; infinite if a class can do nothing in it."""
        setting = self.setting
        if any(not setting.modes[name] for name in setting.classes):
            return float("inf")
        return self._fixed_s + self.paces.least_seconds(setting) + self._least_update_s()

    def solve(self, below_s: float) -> Solution | None:
        """The fastest choice; None if none fits, or all take longer than `below_s`."""
        if not self.paces.enough(self.setting, below_s - self._fixed_s):
            return None
        found = self._nearest_first(below_s - self._fixed_s)
        return None if found is None else Solution(self.setting, *found, self._fixed_s)

    @cached_property
    def _fixed_s(self) -> float:
        setting = self.setting
        return exposed_seconds(setting.profile, setting.links) + self._fixed_update_s()

    def _fixed_update_s(self) -> float:
        """Where nothing is sharded every device updates everything."""
        if self.setting.zero_stage > 0:
            return 0.0
        return max(map(self.setting.update_s, self.setting.classes))

    def _least_update_s(self) -> float:
        """All devices of a pool update at once; the pool that takes the longest decides."""
        setting = self.setting
        if setting.zero_stage == 0:
            return 0.0
        longest = 0.0
        for pool in setting.pools:
            needed = [(len(there[0]), setting.update_s(name)) for name, there in pool.classes]
            if all(update_s > 0 for _, update_s in needed):
                longest = max(longest, 1.0 / sum(n / update_s for n, update_s in needed))
        return longest

    def _nearest_first(self, within_s: float) -> Found | None:
        """The fastest choice of those whose passes take at most `within_s`.

        Limits are tried that are not far from the least, for they leave few options; and few sizes
        first where there are many options even so. A choice that takes no longer than the limit it
        was looked for in, among all sizes, is the fastest of all: whatever is faster was in the
        tables too. If none of few sizes fits, all small ones are tried too: what is wanted then is
        room, and large ones take more of it.
        """
        largest = max(self._largest.values())
        every = self._every(largest)
        if within_s < float("inf") and self._cells(within_s) <= FEW_CELLS:
            return self._among(every, within_s)
        least = self.paces.least_seconds(self.setting)
        limits = [least * factor for factor in NEAR if 0 < least * factor < within_s]
        limits.append(within_s)
        for limit in limits:
            sizes = every if self._cells(limit) <= FEW_CELLS else _few(largest)
            found = self._among(sizes, limit)
            if found is None:
                if limit == limits[0] and not may_fit(self.setting, self.batch):
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
        if self.setting.memory.ones_are_least(self.batch):
            return None
        found = self._among(np.union1d(every[:SMALL_SIZES], _few(largest)), within_s)
        return found and self._among(every, found[1].limits.total_s * (1.0 + TOLERANCE))

    def _every(self, largest: int) -> IntArray:
        """All sizes of a micro-batch; of large ones, where one sample more or less makes no
        difference, those that are a little larger than the one before, and points of curves."""
        if largest <= EXACT_SIZES:
            return np.arange(1, largest + 1)
        steps = np.geomspace(EXACT_SIZES, largest, LARGE_SIZES).astype(np.int64)
        classes = self.setting.classes
        points = {n for name in classes for n in corners(self.setting.profile, name, largest)}
        exact = np.arange(1, EXACT_SIZES + 1)
        return np.unique(np.concatenate([exact, steps, _few(largest), sorted(points)]))

    @cached_property
    def _largest(self) -> dict[str, int]:
        """The largest micro-batch that each class has room for."""
        return {n: self.paces.largest_micro_batch(self.setting, n) for n in self.setting.classes}

    def _cells(self, within_s: float) -> int:
        """The options of a class within `within_s` are not more, in each mode."""
        most = self._most_samples(within_s)
        rows = {name: n + 1 - self._least_samples(most, name) for name, n in most.items()}
        return max(rows[name] * min(self._largest[name], n) for name, n in most.items())

    def _most_samples(self, within_s: float) -> dict[str, int]:
        """More samples than this no device of a class can do in `within_s`."""
        classes = self.setting.classes
        return {name: self.paces.most_samples(self.setting, name, within_s) for name in classes}

    def _least_samples(self, most: Mapping[str, int], name: str) -> int:
        """A device of class `name` does no fewer samples if no other does more than `most`."""
        reached = sum(len(ds) * most[n] for n, ds in self.setting.classes.items())
        return max(0, self.batch - reached + most[name])

    def _among(self, sizes: IntArray, within_s: float) -> Found | None:
        """The fastest choice among micro-batches of `sizes`."""
        if within_s < 0:
            return None
        setting, classes = self.setting, self.setting.classes
        most = self._most_samples(within_s)
        options: dict[str, ClassOptions] = {}
        # Those first that may prove with the fewest options that the batch is too large.
        for name in sorted(classes, key=lambda n: (-len(classes[n]) * most[n], n)):
            largest = max(1, min(self._largest[name], most[name]))
            least = self._least_samples(most, name)
            if least > most[name]:
                return None
            grid = self.paces.grids.of(least, most[name], sizes[sizes <= largest])
            options[name] = tabulate(setting, name, grid, within_s)
            if not len(options[name].rows):
                return None
            most[name] = int(options[name].rows[-1])
        pools = pool_options(setting, options)
        choice = fastest(pools, self.batch, self.gap)
        return None if choice is None else (pools, choice)


Found = tuple[tuple[PoolOptions, ...], Choice]


def _few(largest: int) -> IntArray:
    """Micro-batch sizes up to `largest`, evenly spread in their logarithm."""
    return np.unique(np.geomspace(1, largest, FEW_SIZES).astype(np.int64))


def _speeds(searches: Sequence[_Search]) -> dict[str, float]:
    """The most samples a second that a device of each class computes in any of the settings."""
    speeds: dict[str, float] = {}
    for search in searches:
        for name in search.setting.classes:
            if search.setting.modes[name]:
                per_sample = search.paces.seconds_per_sample(search.setting, name)
                speed = 1.0 / per_sample if per_sample > 0 else float("inf")
                speeds[name] = max(speeds.get(name, 0.0), speed)
            else:
                speeds.setdefault(name, 0.0)
    return speeds


def _plan(solution: Solution, batch: int, bound_s: float) -> Plan:
    """The solution as a plan, counted again without shortcuts."""
    plan = assemble(
        solution.setting,
        strategy="optimal",
        global_batch=batch,
        parts=parts(solution.setting, solution.pools, solution.choice, batch),
        bound_s=bound_s,
    )
    for worker in predicted(plan).workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes, worker
    return plan
