"""Reasons why a policy's plan does not fit: the short device class and the missing bytes.

`planner.data_parallel.no_fit_error` does so for all possible plans. Here only the plans of one
policy count, with equal shares, and the way out is the policy without the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.memory_layout.curves import IntArray, MicroBatches
from gpumix.cost.peak_memory import compute_free_bytes, compute_usable_bytes
from gpumix.planner.common.score import compute_host_excess_bytes, compute_peak_bytes
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.common.stage_preconditions import ALLOW_ONE_STAGE_FIX
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan, WorkerPrediction
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import show_bytes, show_exact_bytes


class Shortage(NamedTuple):
    """Bytes missing in a device's own memory, or in its part of host memory."""

    bytes: int = 0
    on_host: bool = False

    @classmethod
    def least(cls, over: IntArray, over_host: IntArray) -> Shortage:
        """Return the shortage at the best of several sizes, given the excess over both."""
        best = int(np.maximum(over, over_host).argmin())
        short = max(0, int(over[best]), int(over_host[best]))
        return cls(short, short > 0 and bool(over_host[best] > over[best]))


# A setting, and the shortage of each class.
SettingShortage = tuple[ShardingSetting, Mapping[str, Shortage]]


def make_policy_error(what: str, lacks: Iterable[SettingShortage]) -> NoFeasiblePlanError:
    """Return the error naming the class with the largest shortage, in the nearest way."""
    tried = list(lacks)
    if not tried:
        return NoFeasiblePlanError(
            f"{what} is not possible: all devices must use one mode, and none of the allowed modes "
            "was measured on every device class",
            code="policy-modes-not-measured",
            fix="use `strategy: optimal`, which chooses a mode for each class",
        )
    setting, excess = min(tried, key=lambda t: (max(t[1].values()), t[0].zero_stage))
    short = {name: over for name, over in excess.items() if over.bytes > 0}
    if not short:
        return NoFeasiblePlanError(
            f"{what} does not fit: no division that its rules allow fits all devices",
            code="policy-does-not-fit",
            fix="use `strategy: optimal`, which gives each device a share of its own and may fit",
        )
    name = max(short, key=lambda n: (short[n], n))
    each = _describe_shortages(setting.profile, short)
    who = f"{'the host of ' if short[name].on_host else ''}device class '{name}'"
    return NoFeasiblePlanError(
        f"{what} does not fit: {who} is short of {show_exact_bytes(short[name].bytes)}",
        code="policy-does-not-fit",
        why=f"{each}, at the best micro-batch and with 1/{len(setting.devices)} of the state",
        fix="use `strategy: optimal`, which gives devices with less memory a smaller share"
        + (", and keeps nothing on a host that has no room" if short[name].on_host else ""),
    )


def _describe_shortages(profile: Profile, short: Mapping[str, Shortage]) -> str:
    return "; ".join(
        f"{name} is short of {show_exact_bytes(lacking.bytes)} of the "
        + (
            f"{show_bytes(find_room_on_host(profile, name) or 0)} that its host has for it"
            if lacking.on_host
            else f"{show_bytes(compute_usable_bytes(profile.cluster.class_named(name)))} it can use"
        )
        for name, lacking in sorted(short.items())
    )


class NearestMiss:
    """Plans of stages that do not fit; the nearest plan is reported.

    Args:
        what: subject of the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._nearest: dict[str, Shortage] = {}

    def note(self, plan: Plan, workers: Iterable[WorkerPrediction]) -> None:
        """Note a plan with the predictions of its workers."""
        short: dict[str, Shortage] = {}
        for worker, expected in zip(plan.workers, workers):
            over = expected.peak_bytes - expected.memory_limit_bytes
            if over > 0:
                name = worker.device_class
                short[name] = max(Shortage(over), short.get(name, Shortage()))
        if not self._nearest or max(short.values()) < max(self._nearest.values()):
            self._nearest = short

    def error(self, profile: Profile) -> NoFeasiblePlanError:
        return NoFeasiblePlanError(
            f"{self._what} does not fit the devices",
            code="policy-does-not-fit",
            why=f"{_describe_shortages(profile, self._nearest)}, in the plan closest to fitting"
            if self._nearest
            else "no stage has room for its state and a micro-batch",
            fix=f"lower `global_batch_size` or `sequence_length`, or {ALLOW_ONE_STAGE_FIX}",
        )


def iterate_shortages(
    ways: Iterable[tuple[ShardingSetting, Mode]], batch: int
) -> Iterator[SettingShortage]:
    """Yield the shortage of each setting and mode, with equal samples and shares on all devices,
    each class at the best micro-batch."""
    for setting, mode in ways:
        samples = -(-batch // len(setting.devices))
        yield (
            setting,
            {name: compute_shortage(setting, name, mode, samples) for name in setting.classes},
        )


def compute_shortage(setting: ShardingSetting, name: str, mode: Mode, samples: int) -> Shortage:
    """Return the shortage of a device of class `name` with `samples` samples and an equal share."""
    sizes = np.arange(1, setting.largest_micro_batch(name, samples) + 1)
    micro = MicroBatches.of(np.full(len(sizes), samples), sizes)
    held = compute_peak_bytes(setting, name, micro, mode, 1.0 / len(setting.devices))
    over = np.ceil(held - compute_free_bytes(setting.profile, name)).astype(np.int64)
    over_host = np.ceil(compute_host_excess_bytes(setting, name, micro, mode)).astype(np.int64)
    return Shortage.least(over, over_host)
