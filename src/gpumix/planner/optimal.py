"""The fastest plan: samples, micro-batches and state shares decided together.

Devices of one class are interchangeable, so the unknowns are how many devices of a class take
which option. The result is exact for the cost model in `gpumix.cost`, down to the rounding of a cut
to whole elements. Large problems are solved twice: first with few micro-batch sizes, whose answer
bounds what is worth tabulating for the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpumix.cost.curves import IntArray
from gpumix.cost.network import native_pays
from gpumix.cost.time import exposed_seconds
from gpumix.planner.balance import parts
from gpumix.planner.base import PlanRequest, Setting, assemble, predicted, ranked_devices
from gpumix.planner.options import TOLERANCE, ClassOptions, samples_bound, tabulate
from gpumix.planner.search import Choice, fastest
from gpumix.planner.shortage import no_room
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile

FEW_SAMPLES = 96  # up to this many, all options are tabulated at once
FEW_SIZES = 24  # beyond, so many micro-batch sizes, evenly spread in their logarithm, come first


@dataclass(frozen=True)
class Solution:
    """The fastest choice in one setting, and the options that it was chosen from."""

    setting: Setting
    options: tuple[ClassOptions, ...]
    choice: Choice


def optimal(profile: Profile, request: PlanRequest) -> Plan:
    """The plan with the shortest step.

    Where equal shares have faster collectives, the best plan with equal shares and the best plan
    with free shares are compared; the former wins a tie.

    Raises:
        InputError: the request names devices that the profile does not know.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
    """
    devices, batch = ranked_devices(profile, request), request.global_batch
    free = Setting.of(profile, devices, equal_shares=False)
    best = _fastest_plan(free, batch, float("inf"))
    if native_pays(profile):
        equal = Setting.of(profile, devices, equal_shares=True)
        below = float("inf") if best is None else predicted(best).step_s
        best = _fastest_plan(equal, batch, below) or best
    if best is None:
        raise no_room(free, batch)
    return best


def _fastest_plan(setting: Setting, batch: int, below_s: float) -> Plan | None:
    """The fastest plan in this setting; None if none fits or all take longer than `below_s`."""
    solution = _solve(setting, batch, below_s - exposed_seconds(setting.profile, setting.links))
    if solution is None:
        return None
    plan = _plan(solution, batch)
    return plan if predicted(plan).step_s <= below_s else None


def _solve(setting: Setting, batch: int, within_s: float) -> Solution | None:
    """The fastest choice of those whose passes take at most `within_s`."""
    if batch > FEW_SAMPLES:
        few = np.unique(np.geomspace(1, batch, FEW_SIZES).astype(np.int64))
        rough = _search(setting, batch, few, within_s)
        if rough is None and within_s == float("inf") and setting.memory.ones_are_least(batch):
            return None
        if rough is not None:
            within_s = min(within_s, rough.choice.limits.total_s * (1.0 + TOLERANCE))
    return _search(setting, batch, np.arange(1, batch + 1), within_s)


def _search(setting: Setting, batch: int, sizes: IntArray, within_s: float) -> Solution | None:
    """The fastest choice among micro-batches of `sizes` whose passes take at most `within_s`."""
    if within_s < 0:
        return None
    options = []
    for name in setting.classes:
        most = samples_bound(setting, name, batch, within_s)
        largest = setting.largest_micro_batch(name, max(1, most))
        options.append(
            tabulate(
                setting,
                name,
                batch=most,
                sizes=sizes[sizes <= largest],
                within_s=within_s,
            )
        )
    choice = fastest(options, batch)
    return None if choice is None else Solution(setting, tuple(options), choice)


def _plan(solution: Solution, batch: int) -> Plan:
    """The solution as a plan, counted again without shortcuts."""
    setting = solution.setting
    by_class = parts(solution.options, solution.choice, batch)
    plan = assemble(
        setting,
        strategy="optimal",
        global_batch=batch,
        parts={
            device.id: part
            for devices, row in zip(setting.classes.values(), by_class)
            for device, part in zip(devices, row)
        },
    )
    for worker in predicted(plan).workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes, worker
    return plan
