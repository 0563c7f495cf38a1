"""The plan of Whale (USENIX ATC 2022): load by peak FLOP/s, then shifted until memory suffices.

Each device starts with samples in proportion to its peak. While some devices are overloaded, the
device with the fullest memory hands samples to the least busy free device: as many as exceed its
limit, or as fit on the receiver. Devices store equal shares and run equally many micro-batches, a
number tuned by doubling; the ZeRO stage and the mode are tuned too. Devices of a class with equally
many samples are counted, not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gpumix.cost.memory_layout.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.peak_memory import compute_usable_bytes
from gpumix.planner.common.class_split import ClassSplit, Runs, apportion
from gpumix.planner.common.policy_shortage import iterate_shortages, make_policy_error
from gpumix.planner.common.score import (
    DeviceLoad,
    compute_peak_bytes,
    compute_share_capacities,
    iterate_even_settings,
)
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile


def plan_proportional(profile: Profile, request: PlanRequest) -> Plan:
    """Plan samples by peak FLOP/s and equal shares, with the fastest stage, mode and number of
    micro-batches that fit. Ties go to high ZeRO stages, plain modes, few micro-batches.

    Raises:
        InputError: a peak is not known, or the profile lacks a device.
        NoFeasiblePlanError: wherever samples are moved, some device has too many.
    """
    devices, batch = list_devices_by_rank(profile, request), request.global_batch
    peaks = get_peak_flops(profile, devices)
    ways = list(iterate_even_settings(profile, devices, request.space))
    found = [
        division
        for setting, mode in ways
        for division in _iterate_divisions(setting, mode, batch, peaks)
    ]
    if not found:
        raise make_policy_error(
            "a plan in proportion to peak FLOP/s", iterate_shortages(ways, batch)
        )
    return min(found, key=lambda d: d.step_s).plan("proportional")


def get_peak_flops(profile: Profile, devices: tuple[Device, ...]) -> dict[str, float]:
    """Return the FLOP/s of each class by datasheet, or as emulated.

    Raises:
        InputError: neither is known of a class.
    """
    peaks: dict[str, float] = {}
    for name in sorted({d.device_class for d in devices}):
        device_class = profile.cluster.class_named(name)
        peak = device_class.peak_flops_per_s or device_class.emulate_flops_per_s
        if not peak:
            raise InputError(
                f"the peak FLOP/s of device class '{name}' is not known, and `proportional` "
                "divides by peaks",
                code="peak-flops-unknown",
                where=f"cluster: classes.{name}",
                fix="set `peak_flops`, such as `peak_flops: 65 TFLOP/s`, or use a strategy "
                "that uses measurements",
            )
        peaks[name] = float(peak)
    return peaks


def _iterate_divisions(
    setting: ShardingSetting, mode: Mode, batch: int, peaks: Mapping[str, float]
) -> Iterator[ClassSplit]:
    """Yield fitting divisions in a setting and mode, for 1, 2, 4, ... micro-batches."""
    start = apportion(
        batch,
        [peaks[name] for name in setting.classes],
        [batch] * len(setting.classes),
        [len(devices) for devices in setting.classes.values()],
    )
    assert start is not None
    most = max(samples for runs in start for samples, _ in runs)
    number = 1
    while True:
        held = [_ClassMemory.of(setting, name, mode, batch, number) for name in setting.classes]
        runs = _LoadShift(held, list(peaks.values()), start).run()
        if runs is not None:
            yield _division(setting, mode, number, runs)
        if number >= most:  # a sample for each micro-batch
            return
        number *= 2


def _division(
    setting: ShardingSetting, mode: Mode, number: int, runs: tuple[Runs, ...]
) -> ClassSplit:
    share = 1.0 / len(setting.devices)
    return ClassSplit(
        setting,
        tuple(
            (
                DeviceLoad(
                    name, samples, _micro_batch(setting, name, samples, number), share, mode
                ),
                count,
            )
            for name, of_class in zip(setting.classes, runs)
            for samples, count in of_class
        ),
    )


def _micro_batch(setting: ShardingSetting, name: str, samples: int, number: int) -> int:
    """Return the size of `number` micro-batches of `samples`, at most the largest measured."""
    return setting.largest_micro_batch(name, -(-samples // number))


@dataclass(frozen=True)
class _ClassMemory:
    """Memory of a device of one class: the part filled by each number of samples, never falling;
    and the most samples with room, -1 if not even 0."""

    part: FloatArray
    most: int

    @classmethod
    def of(
        cls, setting: ShardingSetting, name: str, mode: Mode, batch: int, number: int
    ) -> _ClassMemory:
        samples: IntArray = np.arange(batch + 1)
        sizes = np.minimum(-(-samples // number), setting.largest_micro_batch(name, batch))
        micro = MicroBatches.of(samples, sizes)
        share = 1.0 / len(setting.devices)
        framework = setting.profile.of_class(name).framework_bytes
        usable = compute_usable_bytes(setting.profile.cluster.class_named(name))
        held = compute_peak_bytes(setting, name, micro, mode, share) + framework
        fits = np.logical_and.accumulate(
            compute_share_capacities(setting, name, micro, mode) >= share
        )
        return cls(np.maximum.accumulate(held) / usable, int(fits.sum()) - 1)


class _LoadShift:
    """Whale's algorithm 1, on the number of devices by class and samples.

    Of devices equally overloaded, or equally free, the class first in `peaks` comes first.
    """

    def __init__(
        self, held: list[_ClassMemory], peaks: list[float], start: tuple[Runs, ...]
    ) -> None:
        self._held = held
        self._peaks = peaks
        self._count = Counter({(c, n): k for c, runs in enumerate(start) for n, k in runs})

    def run(self) -> tuple[Runs, ...] | None:
        """Return samples by class once memory suffices; None if memory never does."""
        if any(held.most < 0 for held in self._held):
            return None
        while overloaded := [key for key, k in self._count.items() if k and self._room(key) < 0]:
            free = [key for key, k in self._count.items() if k and self._room(key) > 0]
            if not free:
                return None
            self._move(max(overloaded, key=self._filled), min(free, key=self._busy))
        return tuple(
            tuple(sorted(((n, k) for (c, n), k in self._count.items() if k and c == which)))
            for which in range(len(self._held))
        )

    def _room(self, key: tuple[int, int]) -> int:
        which, samples = key
        return self._held[which].most - samples

    def _filled(self, key: tuple[int, int]) -> tuple[float, int, int]:
        which, samples = key
        return float(self._held[which].part[samples]), -which, samples

    def _busy(self, key: tuple[int, int]) -> tuple[float, float, int]:
        which, samples = key
        return samples / self._peaks[which], float(self._held[which].part[samples]), which

    def _move(self, peak: tuple[int, int], valley: tuple[int, int]) -> None:
        """Move samples from devices of `peak` to as many devices of `valley`, in pairs."""
        moved = min(-self._room(peak), self._room(valley))
        pairs = min(self._count[peak], self._count[valley])
        for which, change in ((peak, -moved), (valley, moved)):
            self._count[which] -= pairs
            self._count[which[0], which[1] + change] += pairs
