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
    PoolOptions,
    pool_options,
    samples_bound,
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
    for setting in choices:
        below = float("inf") if best is None else best.step_s
        solution = solve(setting, batch, below)
        if solution is not None:
            bound = min(bound, solution.bound_s)
            if solution.step_s < below * (1.0 - TOLERANCE):
                best = solution
    if best is None:
        return None
    return _plan(best, batch, strategy, bound)


def solve(setting: Setting, batch: int, below_s: float = float("inf")) -> Solution | None:
    """The fastest choice in one setting; None if none fits, or all take longer than `below_s`."""
    fixed = exposed_seconds(setting.profile, setting.links) + _fixed_update_s(setting)
    if any(not setting.modes_of(name) for name in setting.classes):
        return None
    found = _solve(setting, batch, below_s - fixed)
    if found is None:
        return None
    pools, choice = found
    return Solution(setting, pools, choice, fixed)


def _fixed_update_s(setting: Setting) -> float:
    """Where nothing is sharded every device updates everything."""
    if setting.zero_stage > 0:
        return 0.0
    return max(optimizer_seconds(setting.profile, name) for name in setting.classes)


Found = tuple[tuple[PoolOptions, ...], Choice]


def _solve(setting: Setting, batch: int, within_s: float) -> Found | None:
    """The fastest choice of those whose passes take at most `within_s`."""
    if batch > FEW_SAMPLES:
        few = np.unique(np.geomspace(1, batch, FEW_SIZES).astype(np.int64))
        rough = _search(setting, batch, few, within_s)
        if rough is None and within_s == float("inf") and setting.memory.ones_are_least(batch):
            return None
        if rough is not None:
            within_s = min(within_s, rough[1].limits.total_s * (1.0 + TOLERANCE))
    return _search(setting, batch, np.arange(1, batch + 1), within_s)


def _search(setting: Setting, batch: int, sizes: IntArray, within_s: float) -> Found | None:
    """The fastest choice among micro-batches of `sizes` whose passes take at most `within_s`."""
    if within_s < 0:
        return None
    options: dict[str, ClassOptions] = {}
    for name in setting.classes:
        most = samples_bound(setting, name, batch, within_s)
        largest = setting.largest_micro_batch(name, max(1, most))
        options[name] = tabulate(
            setting, name, batch=most, sizes=sizes[sizes <= largest], within_s=within_s
        )
    if not _enough(setting, options, batch):
        return None
    pools = pool_options(setting, options)
    gap = IMPROVEMENT if len(setting.devices) <= FEW_DEVICES else LARGE_GAP
    choice = fastest(pools, batch, gap)
    return None if choice is None else (pools, choice)


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
