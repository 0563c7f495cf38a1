"""The plan without a divided batch: one device computes each batch at once, all devices store.

For losses coupling the samples of a batch (batch norm, in-batch negatives): no other plan computes
these as one process does. The device, its mode, the ZeRO stage and the form of the collectives are
those of the fastest step; the state is spread as evenly as room allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.planner.common.class_split import ClassSplit
from gpumix.planner.common.device_pool import Fleet
from gpumix.planner.common.score import DeviceLoad, compute_share_capacities
from gpumix.planner.common.sharding_setting import ShardingSetting, iterate_settings
from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.planner.data_parallel.branch_and_bound import find_fill_level
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.coupled_losses import WHOLE_BATCH
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile

FULL_STATE_SHARE = 1.0 - 1e-9  # part of the state that must have room


def plan_undivided(profile: Profile, request: PlanRequest) -> Plan:
    """Return the fastest plan without a divided batch.

    Raises:
        InputError: the profile lacks a device.
        NoFeasiblePlanError: no device has room for a whole batch next to its part of the state, or
            all devices together have none for the state.
    """
    batch = request.global_batch
    fleet = Fleet.of(profile, list_devices_by_rank(profile, request))
    found = (
        division
        for setting in iterate_settings(fleet, request.space)
        if setting.sharding == "all"
        for name in setting.classes
        for division in _iterate_divisions(setting, name, batch)
    )
    best = min(found, key=lambda division: division.step_s, default=None)
    if best is None:
        raise NoFeasiblePlanError(
            f"no device computes a batch of {batch} samples at once",
            code="undivided-batch-does-not-fit",
            why="the batch and a share of the state do not fit, or this size was not measured",
            fix="lower `global_batch_size`, or use a loss that does not couple samples",
        )
    return best.plan("undivided")


def select_strategy(couples: str) -> str:
    """Return the strategy for a loss coupling samples as much as `couples` says."""
    return "undivided" if couples == WHOLE_BATCH else "optimal"


def _iterate_divisions(setting: ShardingSetting, name: str, batch: int) -> Iterator[ClassSplit]:
    """Yield divisions with one computing device of class `name`; the rest store in a first mode."""
    if setting.largest_micro_batch(name, batch) < batch:
        return
    computed, nothing = MicroBatches.of([batch], [batch]), MicroBatches.of([0], [1])
    idle = {one: setting.modes[one][0] for one in setting.classes}
    room = {
        one: float(compute_share_capacities(setting, one, nothing, idle[one])[0]) for one in idle
    }
    for mode in setting.modes[name]:
        busy = float(compute_share_capacities(setting, name, computed, mode)[0])
        shares = _divide_state(setting, name, busy, room)
        if shares is not None:
            yield _make_split(setting, name, batch, mode, idle, shares)


def _divide_state(
    setting: ShardingSetting, name: str, busy: float, room: Mapping[str, float]
) -> dict[str, float] | None:
    """Return the shares of the computing device ("") and of storing devices by class, or None.

    Args:
        busy: the largest share with room on the computing device; -1 for none at all.
        room: the largest share with room on storing devices, by class.
    """
    counts = {one: len(of) - (one == name) for one, of in setting.classes.items()}
    most = {"": busy, **{one: room[one] for one, count in counts.items() if count}}
    if min(most.values()) < 0:
        return None
    number = len(setting.devices)
    if setting.zero_stage == 0 or setting.equal_shares:
        fits = min(most.values()) >= (1.0 if setting.zero_stage == 0 else 1.0 / number)
        return dict.fromkeys(most, 1.0 / number) if fits else None
    most = {one: min(own, 1.0, setting.cap / number) for one, own in most.items()}
    counts = {"": 1, **counts}
    if sum(most[one] * counts[one] for one in most) < FULL_STATE_SHARE:
        return None
    number_of = np.asarray([counts[one] for one in most], float)
    height = find_fill_level(np.asarray([*most.values()]), np.ones(len(most)), number_of)
    return {one: min(own, height) for one, own in most.items()}


def _make_split(
    setting: ShardingSetting,
    name: str,
    batch: int,
    mode: Mode,
    idle: Mapping[str, Mode],
    shares: Mapping[str, float],
) -> ClassSplit:
    loads = [(DeviceLoad(name, batch, batch, shares[""], mode), 1)]
    for one, devices in setting.classes.items():
        count = len(devices) - (one == name)
        if count:
            loads.append((DeviceLoad(one, 0, 0, shares[one], idle[one]), count))
    return ClassSplit(setting, tuple(loads))
