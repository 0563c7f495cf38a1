"""The plan of Poplar (AAAI 2025): each device by its own measured curve, at every ZeRO stage.

Rebuilt from what is known of Poplar. A device runs micro-batches as large as memory allows next to
an equal share of the state. At stages 0 and 1 ranks synchronize once a step: each device runs its
fastest micro-batch, as often as its speed asks for. At stages 2 and 3 ranks synchronize in every
micro-batch, so all run equally many; the time of a micro-batch is swept over all measured times.
The fastest stage by the common cost model wins. So does the fastest mode, equal for all devices;
Poplar itself has a single mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpumix.cost.memory_layout.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.network.collective_times import make_free_collectives
from gpumix.cost.step_time import compute_pass_seconds
from gpumix.planner.common.class_split import ClassSplit, apportion, split_with_equal_shares
from gpumix.planner.common.policy_shortage import iterate_shortages, make_policy_error
from gpumix.planner.common.score import compute_share_capacities, iterate_even_settings
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.planner.data_parallel.class_options import TOLERANCE
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile


def plan_poplar(profile: Profile, request: PlanRequest) -> Plan:
    """Return the fastest of Poplar's plans over all stages and modes; on ties the highest stage,
    then the plainest mode.

    Raises:
        InputError: the profile lacks a device.
        NoFeasiblePlanError: at every stage a device cannot hold a share and one sample, or the
            devices cannot hold the batch.
    """
    devices, batch = list_devices_by_rank(profile, request), request.global_batch
    ways = list(iterate_even_settings(profile, devices, request.space))
    tried = [_divide_samples(setting, mode, batch) for setting, mode in ways]
    found = [division for division in tried if division is not None]
    if not found:
        raise make_policy_error("a plan by Poplar's rules", iterate_shortages(ways, batch))
    return min(found, key=lambda d: d.step_s).plan("poplar")


@dataclass(frozen=True)
class _Speed:
    """Measured speed of a device of one class: seconds of both passes of a micro-batch of 1, 2, ...
    samples, as far as memory allows, without collectives."""

    name: str
    devices: int
    seconds: FloatArray

    @property
    def best(self) -> int:
        """The micro-batch with the most samples a second, on ties the smallest."""
        each = self.seconds / self._sizes
        return int(np.argmax(each <= each.min() * (1.0 + TOLERANCE))) + 1

    @property
    def samples_per_s(self) -> float:
        least = float((self.seconds / self._sizes).min())
        return 1.0 / least if least > 0 else float("inf")

    @property
    def _sizes(self) -> IntArray:
        return np.arange(1, len(self.seconds) + 1)

    def size_within(self, seconds: FloatArray) -> IntArray:
        """Return the largest micro-batch taking at most `seconds`."""
        return np.searchsorted(self.seconds, seconds, side="right").astype(np.int64)


def _divide_samples(setting: ShardingSetting, mode: Mode, batch: int) -> ClassSplit | None:
    """Return Poplar's division in a setting and mode; None if impossible."""
    speeds = [_speed(setting, name, mode, batch) for name in setting.classes]
    if not all(len(speed.seconds) for speed in speeds):
        return None
    by_stage = _divide_by_speed if setting.zero_stage <= 1 else _divide_in_lockstep
    return by_stage(setting, mode, batch, speeds)


def _speed(setting: ShardingSetting, name: str, mode: Mode, batch: int) -> _Speed:
    sizes = np.arange(1, setting.largest_micro_batch(name, batch) + 1)
    micro = MicroBatches.of(sizes, sizes)
    free = make_free_collectives(setting.links.buckets)
    forward, backward = compute_pass_seconds(setting.profile, name, free, micro, mode)
    fits = np.logical_and.accumulate(_fits(setting, name, micro, mode))
    return _Speed(name, len(setting.classes[name]), (forward + backward)[fits])


def _fits(
    setting: ShardingSetting, name: str, micro: MicroBatches, mode: Mode
) -> npt.NDArray[np.bool_]:
    """Return a mask of `micro` leaving room for an equal share."""
    return compute_share_capacities(setting, name, micro, mode) >= 1.0 / len(setting.devices)


# -- stages 0 and 1 --------------------------------------------------------------------------------


def _divide_by_speed(
    setting: ShardingSetting, mode: Mode, batch: int, speeds: list[_Speed]
) -> ClassSplit | None:
    """Divide samples by speed, each device in micro-batches of its own best size."""
    most = []
    for speed in speeds:
        micro = MicroBatches.of(np.arange(batch + 1), speed.best)
        fits = np.logical_and.accumulate(_fits(setting, speed.name, micro, mode))
        most.append(int(fits.sum()) - 1)
    runs = apportion(batch, [s.samples_per_s for s in speeds], most, [s.devices for s in speeds])
    if runs is None:
        return None
    return split_with_equal_shares(setting, mode, runs, [s.best for s in speeds])


# -- stages 2 and 3 --------------------------------------------------------------------------------


def _divide_in_lockstep(
    setting: ShardingSetting, mode: Mode, batch: int, speeds: list[_Speed]
) -> ClassSplit | None:
    """Run equally many micro-batches on all devices, each as large as a common time allows.

    Of all numbers of micro-batches, each at the least sufficient time, the number counts at which
    micro-batches and collectives take the least together; the fewest on ties. The last micro-batch
    is trimmed: its samples go by the sizes of the others.
    """
    largest = [_find_largest_micro_batches(setting, mode, batch, speed) for speed in speeds]
    pace, enough = _find_least_times(speeds, largest, batch)
    cost = np.arange(1, batch + 1) * (pace + _collective_seconds(setting))
    if not enough.any():
        return None
    place = int(np.argmin(np.where(enough, cost, np.inf)))
    sizes = [
        int(min(most[place], speed.size_within(pace[place])))
        for speed, most in zip(speeds, largest)
    ]
    counts = [speed.devices for speed in speeds]
    last = batch - place * sum(m * n for m, n in zip(sizes, counts))
    rest = apportion(last, [float(m) for m in sizes], sizes, counts)
    assert rest is not None, "so many micro-batches hold the whole batch"
    runs = [
        tuple((place * size + samples, count) for samples, count in of_class)
        for size, of_class in zip(sizes, rest)
    ]
    return split_with_equal_shares(setting, mode, tuple(runs), sizes)


def _find_largest_micro_batches(
    setting: ShardingSetting, mode: Mode, batch: int, speed: _Speed
) -> IntArray:
    """Return the largest micro-batch of which 1, 2, ... `batch` fit, as activations waiting for the
    backward add up."""
    sizes = np.arange(1, len(speed.seconds) + 1)
    each = -(-batch // sizes)  # more are never needed
    size = np.repeat(sizes, each)
    number = np.arange(1, len(size) + 1) - np.repeat(np.cumsum(each) - each, each)
    micro = MicroBatches.of(np.minimum(size * number, batch), size)
    too_many = ~_fits(setting, speed.name, micro, mode)
    largest = np.searchsorted(-each, -np.arange(1, batch + 1), side="right")
    np.minimum.at(largest, number[too_many] - 1, size[too_many] - 1)
    return largest


def _find_least_times(
    speeds: list[_Speed], largest: list[IntArray], batch: int
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Return, for each number of micro-batches, the least measured time of a micro-batch at which
    the devices do the whole batch, and True if any is enough; by bisection."""
    times = np.unique(np.concatenate([speed.seconds for speed in speeds]))
    numbers = np.arange(1, batch + 1)

    def reached(place: IntArray) -> npt.NDArray[np.bool_]:
        at_once = sum(
            speed.devices * np.minimum(most, speed.size_within(times[place]))
            for speed, most in zip(speeds, largest)
        )
        return np.asarray(numbers * at_once >= batch)

    low = np.zeros(batch, dtype=np.int64)
    high = np.full(batch, len(times) - 1)
    enough = reached(high)
    while (low < high).any():
        middle = (low + high) // 2
        good = reached(middle)
        low, high = np.where(good, low, middle + 1), np.where(good, middle, high)
        low = np.minimum(low, high)
    return times[high], enough


def _collective_seconds(setting: ShardingSetting) -> float:
    """Return seconds of a micro-batch's collectives; Poplar's engine gathers in each again."""
    links, counts = setting.links, setting.links.buckets.counts()
    return sum(
        number * (links.gather_s[kind] + links.regather_s[kind] + links.reduce_s[kind])
        for kind, number in counts.items()
    )
