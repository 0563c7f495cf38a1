"""The plan of Whale (USENIX ATC 2022): load by peak FLOP/s, then shifted until memory holds.

Each device starts with samples in proportion to its peak. While some are overloaded, the one whose
memory is filled most hands samples to the free one that is busiest least: as many as it has too
many, or as the other has room for. Devices store equal shares and run the same number of
micro-batches, which is tuned by doubling; so are the ZeRO stage and the mode. Devices of a class
with as many samples are counted, not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gpumix.cost.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.memory import usable_bytes
from gpumix.planner.base import PlanRequest, ranked_devices
from gpumix.planner.division import Division, Runs, apportion
from gpumix.planner.misfit import lacks, too_large
from gpumix.planner.setting import Setting
from gpumix.planner.weigh import Load, capacities, even_settings, peak_bytes
from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.stage import Mode


def proportional(profile: Profile, request: PlanRequest) -> Plan:
    """Samples by peak FLOP/s, equal shares; of the stages, modes and numbers of micro-batches that
    fit the fastest, the first one tried on ties: high ZeRO stages, plain modes, few micro-batches.

    Raises:
        InputError: a peak is not known, or the profile lacks a device.
        NoFeasiblePlanError: wherever samples are moved, some device has too many.
    """
    devices, batch = ranked_devices(profile, request), request.global_batch
    peaks = peak_flops(profile, devices)
    ways = list(even_settings(profile, devices, request.space))
    found = [
        division for setting, mode in ways for division in _divisions(setting, mode, batch, peaks)
    ]
    if not found:
        raise too_large("a plan in proportion to peak FLOP/s", lacks(ways, batch))
    return min(found, key=lambda d: d.step_s).plan("proportional")


def peak_flops(profile: Profile, devices: tuple[Device, ...]) -> dict[str, float]:
    """FLOP/s of each class by its datasheet, or as it is emulated.

    Raises:
        InputError: neither is known of a class.
    """
    peaks: dict[str, float] = {}
    for name in sorted({d.device_class for d in devices}):
        device_class = profile.cluster.class_named(name)
        peak = device_class.peak_flops_per_s or device_class.emulate_flops_per_s
        if not peak:
            raise InputError(
                f"the peak FLOP/s of device class '{name}' is not known, and `proportional` goes "
                "by peaks",
                where=f"cluster: classes.{name}",
                fix="give it as `peak_flops`, such as `peak_flops: 65 TFLOP/s`, or use a strategy "
                "that goes by measurements",
            )
        peaks[name] = float(peak)
    return peaks


def _divisions(
    setting: Setting, mode: Mode, batch: int, peaks: Mapping[str, float]
) -> Iterator[Division]:
    """What fits in a setting and mode, for 1, 2, 4, ... micro-batches."""
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
        held = [_Held.of(setting, name, mode, batch, number) for name in setting.classes]
        runs = _Shift(held, list(peaks.values()), start).run()
        if runs is not None:
            yield _division(setting, mode, number, runs)
        if number >= most:  # every sample by itself
            return
        number *= 2


def _division(setting: Setting, mode: Mode, number: int, runs: tuple[Runs, ...]) -> Division:
    share = 1.0 / len(setting.devices)
    return Division(
        setting,
        tuple(
            (Load(name, samples, _micro_batch(setting, name, samples, number), share, mode), count)
            for name, of_class in zip(setting.classes, runs)
            for samples, count in of_class
        ),
    )


def _micro_batch(setting: Setting, name: str, samples: int, number: int) -> int:
    """The size that cuts `samples` into so many micro-batches, or more if it was not measured."""
    return setting.largest_micro_batch(name, -(-samples // number))


@dataclass(frozen=True)
class _Held:
    """Of a device of one class: the part of its memory that so many samples fill, never falling;
    and the most samples that it has room for, -1 if it has none without samples."""

    part: FloatArray
    most: int

    @classmethod
    def of(cls, setting: Setting, name: str, mode: Mode, batch: int, number: int) -> _Held:
        samples: IntArray = np.arange(batch + 1)
        sizes = np.minimum(-(-samples // number), setting.largest_micro_batch(name, batch))
        micro = MicroBatches.of(samples, sizes)
        share = 1.0 / len(setting.devices)
        framework = setting.profile.of_class(name).framework_bytes
        usable = usable_bytes(setting.profile.cluster.class_named(name))
        held = peak_bytes(setting, name, micro, mode, share) + framework
        fits = np.logical_and.accumulate(capacities(setting, name, micro, mode) >= share)
        return cls(np.maximum.accumulate(held) / usable, int(fits.sum()) - 1)


class _Shift:
    """Whale's algorithm 1, on the number of devices of each class that have so many samples.

    Of devices that are equally overloaded, or equally free, those of the class that comes first in
    `peaks` come first.
    """

    def __init__(self, held: list[_Held], peaks: list[float], start: tuple[Runs, ...]) -> None:
        self._held = held
        self._peaks = peaks
        self._count = Counter({(c, n): k for c, runs in enumerate(start) for n, k in runs})

    def run(self) -> tuple[Runs, ...] | None:
        """Samples by class once memory holds; None if it never does."""
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
        """From each device of `peak` to one of `valley`, as long as there are both."""
        moved = min(-self._room(peak), self._room(valley))
        pairs = min(self._count[peak], self._count[valley])
        for which, change in ((peak, -moved), (valley, moved)):
            self._count[which] -= pairs
            self._count[which[0], which[1] + change] += pairs
