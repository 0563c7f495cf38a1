"""The plan of Poplar (AAAI 2025): each device by its own measured curve, at every ZeRO stage.

Rebuilt from what is known of it. A device runs micro-batches as large as its memory bears beside an
equal share of the state. At stages 0 and 1 ranks meet once a step: each device runs the micro-batch
at which it is fastest, as often as its speed asks for. At stages 2 and 3 they meet in every
micro-batch, so all run as many; the time of one is swept over all times that were measured. The
stage is the one that is fastest in the end, by the common cost model; so is the mode, the same for
all devices, of which theirs has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpumix.cost.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.network import free_links
from gpumix.cost.time import pass_seconds
from gpumix.planner.base import PlanRequest, ranked_devices
from gpumix.planner.division import Division, apportion, evenly_stored
from gpumix.planner.misfit import lacks, too_large
from gpumix.planner.options import TOLERANCE
from gpumix.planner.setting import Setting
from gpumix.planner.weigh import capacities, even_settings
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.stage import Mode


def poplar(profile: Profile, request: PlanRequest) -> Plan:
    """The fastest of their plans over all stages and modes; on ties the highest stage, the plainest
    mode.

    Raises:
        InputError: the profile lacks a device.
        NoFeasiblePlanError: at every stage a device cannot hold a share and one sample, or the
            devices cannot hold the batch.
    """
    devices, batch = ranked_devices(profile, request), request.global_batch
    ways = list(even_settings(profile, devices, request.space))
    tried = [_division(setting, mode, batch) for setting, mode in ways]
    found = [division for division in tried if division is not None]
    if not found:
        raise too_large("a plan by Poplar's rules", lacks(ways, batch))
    return min(found, key=lambda d: d.step_s).plan("poplar")


@dataclass(frozen=True)
class _Speed:
    """What a device of one class was measured to do: seconds of one micro-batch of 1, 2, ...
    samples, forward and backward, as far as memory bears them; collectives apart."""

    name: str
    devices: int
    seconds: FloatArray

    @property
    def best(self) -> int:
        """The micro-batch with the most samples a second, the smallest one on ties."""
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
        """The largest micro-batch that takes no longer."""
        return np.searchsorted(self.seconds, seconds, side="right").astype(np.int64)


def _division(setting: Setting, mode: Mode, batch: int) -> Division | None:
    """Their division in one setting and mode; None if there is none."""
    speeds = [_speed(setting, name, mode, batch) for name in setting.classes]
    if not all(len(speed.seconds) for speed in speeds):
        return None
    by_stage = _own_pace if setting.zero_stage <= 1 else _common_pace
    return by_stage(setting, mode, batch, speeds)


def _speed(setting: Setting, name: str, mode: Mode, batch: int) -> _Speed:
    sizes = np.arange(1, setting.largest_micro_batch(name, batch) + 1)
    micro = MicroBatches.of(sizes, sizes)
    free = free_links(setting.links.buckets)
    forward, backward = pass_seconds(setting.profile, name, free, micro, mode)
    fits = np.logical_and.accumulate(_fits(setting, name, micro, mode))
    return _Speed(name, len(setting.classes[name]), (forward + backward)[fits])


def _fits(setting: Setting, name: str, micro: MicroBatches, mode: Mode) -> npt.NDArray[np.bool_]:
    """Which of `micro` leave room for an equal share."""
    return capacities(setting, name, micro, mode) >= 1.0 / len(setting.devices)


# -- stages 0 and 1 --------------------------------------------------------------------------------


def _own_pace(setting: Setting, mode: Mode, batch: int, speeds: list[_Speed]) -> Division | None:
    """Samples by speed, each device in micro-batches of its own best size."""
    most = []
    for speed in speeds:
        micro = MicroBatches.of(np.arange(batch + 1), speed.best)
        fits = np.logical_and.accumulate(_fits(setting, speed.name, micro, mode))
        most.append(int(fits.sum()) - 1)
    runs = apportion(batch, [s.samples_per_s for s in speeds], most, [s.devices for s in speeds])
    if runs is None:
        return None
    return evenly_stored(setting, mode, runs, [s.best for s in speeds])


# -- stages 2 and 3 --------------------------------------------------------------------------------


def _common_pace(setting: Setting, mode: Mode, batch: int, speeds: list[_Speed]) -> Division | None:
    """As many micro-batches on all devices, each as large as the common time of one allows.

    Of all numbers of them, each at the least time that is enough, the one whose micro-batches and
    collectives take the least together; the fewest on ties. The last micro-batch is trimmed: its
    samples go by the sizes of the others.
    """
    largest = [_largest_by_number(setting, mode, batch, speed) for speed in speeds]
    pace, enough = _least_times(speeds, largest, batch)
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
    return evenly_stored(setting, mode, tuple(runs), sizes)


def _largest_by_number(setting: Setting, mode: Mode, batch: int, speed: _Speed) -> IntArray:
    """The largest micro-batch of which memory bears 1, 2, ... `batch`, for what waits for its
    backward adds up."""
    sizes = np.arange(1, len(speed.seconds) + 1)
    each = -(-batch // sizes)  # more of them are never needed
    size = np.repeat(sizes, each)
    number = np.arange(1, len(size) + 1) - np.repeat(np.cumsum(each) - each, each)
    micro = MicroBatches.of(np.minimum(size * number, batch), size)
    too_many = ~_fits(setting, speed.name, micro, mode)
    largest = np.searchsorted(-each, -np.arange(1, batch + 1), side="right")
    np.minimum.at(largest, number[too_many] - 1, size[too_many] - 1)
    return largest


def _least_times(
    speeds: list[_Speed], largest: list[IntArray], batch: int
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """For each number of micro-batches the least measured time of one with which the devices do the
    whole batch, and whether there is one; by bisection."""
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


def _collective_seconds(setting: Setting) -> float:
    """All collectives of one micro-batch in their engine, which gathers in each anew."""
    links, counts = setting.links, setting.links.buckets.counts()
    return sum(
        number * (links.gather_s[kind] + links.regather_s[kind] + links.reduce_s[kind])
        for kind, number in counts.items()
    )
