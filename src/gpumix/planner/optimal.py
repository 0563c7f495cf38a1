"""The fastest plan: samples, micro-batches, modes and state shares decided together.

Devices of one class are interchangeable, so the unknowns are how many devices of a class take
which option. Every setting (ZeRO stage, pools, form of the collectives) is searched, within the
time of the best so far. Large problems are solved twice: first with few micro-batch sizes, whose
answer bounds what is worth tabulating for the second. The result is exact for the cost model in
`gpumix.cost`, down to the rounding of a cut to whole elements, but for the gap that it states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from gpumix.cost.curves import IntArray
from gpumix.cost.time import exposed_seconds, optimizer_seconds
from gpumix.planner.balance import parts
from gpumix.planner.base import PlanRequest, assemble, predicted, ranked_devices
from gpumix.planner.options import (
    TOLERANCE,
    ClassOptions,
    Paces,
    PoolOptions,
    pool_options,
    tabulate,
)
from gpumix.planner.search import IMPROVEMENT, Choice, fastest
from gpumix.planner.setting import Setting, settings
from gpumix.planner.shortage import no_room
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile

FEW_SAMPLES = 96  # up to this many, all options are tabulated at once
FEW_SIZES = 24  # beyond, so many micro-batch sizes, evenly spread in their logarithm, come first

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


def optimal(profile: Profile, request: PlanRequest) -> Plan:
    """The plan with the shortest step of all that the request's space allows.

    Of plans that are equally fast the one wins that needs the least memory: the highest ZeRO stage.

    Raises:
        InputError: the request names devices that the profile does not know.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
    """
    devices, batch = ranked_devices(profile, request), request.global_batch
    best = best_of(settings(profile, devices, request.space), batch)
    if best is None:
        raise no_room(profile, devices, request.space, batch)
    return best


def best_of(choices: Iterable[Setting], batch: int, strategy: str = "optimal") -> Plan | None:
    """The fastest plan in any of these settings; None if nothing fits."""
    best: Solution | None = None
    bound = float("inf")
    paces = Paces(batch)
    for setting in choices:
        below = float("inf") if best is None else best.step_s
        solution = _Search(setting, batch, paces).solve(below)
        if solution is not None:
            bound = min(bound, solution.bound_s)
            if solution.step_s < below * (1.0 - TOLERANCE):
                best = solution
    if best is None:
        return None
    return _plan(best, batch, strategy, bound)


class _Search:
    """The search for the fastest choice in one setting."""

    def __init__(self, setting: Setting, batch: int, paces: Paces) -> None:
        self.setting = setting
        self.batch = batch
        self.paces = paces
        self.gap = IMPROVEMENT if len(setting.devices) <= FEW_DEVICES else LARGE_GAP

    def solve(self, below_s: float) -> Solution | None:
        """The fastest choice; None if none fits, or all take longer than `below_s`."""
        setting = self.setting
        if any(not setting.modes_of(name) for name in setting.classes):
            return None
        fixed = exposed_seconds(setting.profile, setting.links) + self._fixed_update_s()
        if fixed + self.paces.least_seconds(setting) > below_s * (1.0 + TOLERANCE):
            return None
        found = self._roughly_first(below_s - fixed)
        return None if found is None else Solution(setting, *found, fixed)

    def _fixed_update_s(self) -> float:
        """Where nothing is sharded every device updates everything."""
        if self.setting.zero_stage > 0:
            return 0.0
        return max(optimizer_seconds(self.setting.profile, name) for name in self.setting.classes)

    def _roughly_first(self, within_s: float) -> Found | None:
        """The fastest choice of those whose passes take at most `within_s`."""
        if self.batch > FEW_SAMPLES and within_s == float("inf"):
            few = np.unique(np.geomspace(1, self.batch, FEW_SIZES).astype(np.int64))
            rough = self._among(few, within_s)
            if rough is None and self.setting.memory.ones_are_least(self.batch):
                return None
            if rough is not None:
                within_s = rough[1].limits.total_s * (1.0 + TOLERANCE)
        return self._among(np.arange(1, self.batch + 1), within_s)

    def _among(self, sizes: IntArray, within_s: float) -> Found | None:
        """The fastest choice among micro-batches of `sizes`."""
        if within_s < 0:
            return None
        setting = self.setting
        options: dict[str, ClassOptions] = {}
        for name in setting.classes:
            most = self.paces.most_samples(setting, name, within_s)
            largest = setting.largest_micro_batch(name, max(1, most))
            options[name] = tabulate(
                setting, name, batch=most, sizes=sizes[sizes <= largest], within_s=within_s
            )
        if not _enough(setting, options, self.batch):
            return None
        pools = pool_options(setting, options)
        choice = fastest(pools, self.batch, self.gap)
        return None if choice is None else (pools, choice)


Found = tuple[tuple[PoolOptions, ...], Choice]


def _enough(setting: Setting, options: Mapping[str, ClassOptions], batch: int) -> bool:
    """Whether every class can take part, and all together can compute the batch."""
    if any(not len(o.rows) for o in options.values()):
        return False
    return sum(len(ds) * int(options[n].rows[-1]) for n, ds in setting.classes.items()) >= batch


def _plan(solution: Solution, batch: int, strategy: str, bound_s: float) -> Plan:
    """The solution as a plan, counted again without shortcuts."""
    plan = assemble(
        solution.setting,
        strategy=strategy,
        global_batch=batch,
        parts=parts(solution.setting, solution.pools, solution.choice, batch),
        bound_s=bound_s,
    )
    for worker in predicted(plan).workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes, worker
    return plan
