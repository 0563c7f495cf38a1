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
from gpumix.cost.network import uneven_collectives
from gpumix.cost.time import exposed_seconds
from gpumix.planner.balance import parts
from gpumix.planner.base import PlanRequest, Setting, assemble, ranked_devices
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

    @property
    def step_s(self) -> float:
        exposed = exposed_seconds(self.setting.profile, self.setting.links)
        return exposed + self.choice.limits.total_s


def optimal(profile: Profile, request: PlanRequest) -> Plan:
    """The plan with the shortest step.

    Where the native collectives are the fastest they need equal shares, so the best plan with equal
    shares and the best plan with free shares are compared; equal ones win a tie.

    Raises:
        InputError: the request names devices that the profile does not know.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
    """
    devices = ranked_devices(profile, request)
    batch = request.global_batch
    free = Setting.of(profile, devices, uneven_collectives(profile))
    found = [_solve(free, batch, equal_shares=False)]
    if profile.collectives != free.collectives:
        native = Setting.of(profile, devices, profile.collectives)
        found.insert(0, _solve(native, batch, equal_shares=True))
    solutions = [solution for solution in found if solution is not None]
    if not solutions:
        raise no_room(free, batch)
    return _plan(min(solutions, key=lambda s: s.step_s), batch)


def _solve(setting: Setting, batch: int, *, equal_shares: bool) -> Solution | None:
    within = float("inf")
    if batch > FEW_SAMPLES:
        few = np.unique(np.geomspace(1, batch, FEW_SIZES).astype(np.int64))
        rough = _search(setting, batch, few, within, equal_shares=equal_shares)
        if rough is None and setting.memory.ones_are_least(batch):
            return None
        if rough is not None:
            within = rough.choice.limits.total_s * (1.0 + TOLERANCE)
    every = np.arange(1, batch + 1)
    return _search(setting, batch, every, within, equal_shares=equal_shares)


def _search(
    setting: Setting, batch: int, sizes: IntArray, within_s: float, *, equal_shares: bool
) -> Solution | None:
    """The fastest choice among micro-batches of `sizes` whose passes take at most `within_s`."""
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
                equal_shares=equal_shares,
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
    assert plan.prediction is not None
    for worker in plan.prediction.workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes, worker
    return plan
