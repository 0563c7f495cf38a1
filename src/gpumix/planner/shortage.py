"""Why no plan fits, in bytes: how much is missing, where, and what would help.

Counted at the micro-batches that need the least: those of one sample, but for odd kernels. All
amounts are per device unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from gpumix.cost.curves import FloatArray, MicroBatches
from gpumix.cost.memory import free_bytes, usable_bytes
from gpumix.planner.base import Setting
from gpumix.planner.knapsack import Staircase, select
from gpumix.spec.errors import NoFeasiblePlanError
from gpumix.spec.units import show_bytes

UNREACHABLE = 2**62  # more memory than any device has


def no_room(setting: Setting, batch: int) -> NoFeasiblePlanError:
    """The error that says by how much the devices fall short of the state and the batch."""
    return _Shortage(setting, batch).error()


class _Shortage:
    """What each class would need, tabulated once for all amounts of memory that are tried."""

    def __init__(self, setting: Setting, batch: int) -> None:
        self.setting = setting
        self.batch = batch
        self.counts = {name: len(devices) for name, devices in setting.classes.items()}
        most = 1 if setting.memory.ones_are_least(batch) else batch
        self.sizes = np.arange(
            1, max(setting.largest_micro_batch(name, most) for name in self.counts) + 1
        )
        samples = np.arange(batch + 1)[:, None]
        self.demands = setting.memory.demands(MicroBatches.of(samples, self.sizes))

    def error(self) -> NoFeasiblePlanError:
        count = sum(self.counts.values())
        short = _least(lambda extra: self.fits(self.batch, dict.fromkeys(self.counts, extra)))
        state = show_bytes(self.setting.memory.state_bytes)
        reasons = [f"the state takes {state} over all devices", *map(self._of_class, self.counts)]
        return NoFeasiblePlanError(
            f"no plan fits a global batch of {self.batch}: "
            + (
                f"the device is short of {_amount(short)}"
                if count == 1
                else f"the {count} devices are short of {_amount(short * count)} in all, "
                f"{_amount(short)} each"
            ),
            where=", ".join(f"{number} x {name}" for name, number in self.counts.items()),
            why="; ".join(reasons),
            fix=self._fix(),
        )

    def fits(self, batch: int, extra: Mapping[str, int]) -> bool:
        """Whether state and batch find room if the classes had so many more bytes."""
        samples = np.arange(self.batch + 1)
        stairs = [
            Staircase.of(number, samples, self.capacity(name, extra.get(name, 0)))
            for name, number in self.counts.items()
        ]
        return select(stairs, batch) is not None

    def capacity(self, name: str, extra: int) -> FloatArray:
        """The largest share by samples, if each device of class `name` had `extra` more bytes."""
        by_size = self.demands.capacity(free_bytes(self.setting.profile, name) + extra)
        allowed = self.setting.largest_micro_batch(name, len(self.sizes))
        best: FloatArray = by_size[:, :allowed].max(axis=1)
        return best

    def _of_class(self, name: str) -> str:
        """What one class has and needs, and what it alone would have to have more."""
        usable = usable_bytes(self.setting.profile.cluster.class_named(name))
        idle = _least(lambda extra: bool(self.capacity(name, extra)[0] >= 0))
        text = f"{name} can use {show_bytes(usable)}"
        if idle:
            return f"{text} and is short of {_amount(idle)} even without samples and state"
        alone = _least(lambda extra: self.fits(self.batch, {name: extra}))
        if alone >= UNREACHABLE:
            return f"{text}; more memory there alone would not help"
        return f"{text}; {_amount(alone)} more on each {name} would do"

    def _fix(self) -> str:
        """The ways out, the one that needs no purchase first."""
        too_small = [name for name in self.counts if self.capacity(name, 0)[0] < 0]
        if too_small:
            return f"leave {', '.join(too_small)} out of the cluster, or train a smaller model"
        low, high = 0, self.batch
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, {}) else (low, middle)
        if low:
            return f"set `global_batch: {low}`, the largest that fits, or add devices"
        return "add devices, shorten `sequence_length`, or train a smaller model"


def _least(enough: Callable[[int], bool]) -> int:
    """The least number of bytes that is enough; `UNREACHABLE` if none is. 0 if nothing lacks."""
    if enough(0):
        return 0
    low, high = 0, 1
    while high < UNREACHABLE and not enough(high):
        low, high = high, 2 * high
    if high >= UNREACHABLE:
        return UNREACHABLE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _amount(size: int) -> str:
    """Bytes to the byte, and as a person reads them."""
    return f"{size} bytes ({show_bytes(size)})"
