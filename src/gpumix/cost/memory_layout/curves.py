"""Interpolation between measured points, and sums over a worker's micro-batches.

Measured points are kept; nothing is fitted. All functions take arrays, so the planner evaluates
every choice of a device class at once, with the code that also predicts one plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Self

import numpy as np
import numpy.typing as npt

from gpumix.schema.curve import Curve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ValuesAt = Callable[[IntArray], FloatArray]


def interpolate_bytes(curve: Curve, sizes: npt.ArrayLike) -> FloatArray:
    """Return the bytes at each of `sizes`. A point below an earlier one is raised to it: memory
    once needed may be needed again."""
    return _interpolate(curve, np.maximum.accumulate(np.asarray(curve.values)), sizes)


def interpolate_seconds(curve: Curve, sizes: npt.ArrayLike) -> FloatArray:
    """Return the seconds at each of `sizes`. A point above a later one is lowered to it: noise only
    adds time, and less work takes no longer than more."""
    return _interpolate(curve, np.asarray(_lowered(curve)), sizes)


def interpolate_one_seconds(curve: Curve, size: float) -> float:
    """Return the seconds at one size, without arrays: for links, queried per message."""
    at, values = curve.sizes, _lowered(curve)
    if size <= 0:
        return 0.0
    if size >= at[-1]:
        return values[-1] * (size / at[-1])
    right = bisect_right(at, size)
    if right == 0:
        return values[0]
    left = right - 1
    part = (size - at[left]) / (at[right] - at[left])
    return values[left] + part * (values[right] - values[left])


def remove_timing_noise(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return times of growing work, each lowered to the least later time."""
    return tuple(accumulate(reversed(seconds), min))[::-1]


@lru_cache(maxsize=1024)  # a search asks for the same few curves, thousands of times
def _lowered(curve: Curve) -> tuple[float, ...]:
    return remove_timing_noise(curve.values)


def _interpolate(curve: Curve, values: FloatArray, sizes: npt.ArrayLike) -> FloatArray:
    """Interpolate linearly between points.

    Below the first point the value stays constant (a latency floor); size 0 costs nothing. Beyond
    the last point the value grows in proportion to the size: unmeasured sizes are not assumed to be
    more efficient.
    """
    wanted = np.asarray(sizes, dtype=np.float64)
    at = np.asarray(curve.sizes, dtype=np.float64)
    beyond = np.maximum(wanted / at[-1], 1.0)
    return np.where(wanted <= 0, 0.0, np.interp(wanted, at, values) * beyond)


@dataclass(frozen=True)
class MicroBatches:
    """Split of workers' samples: `full` micro-batches of `size` and one of `rest` samples.

    One entry per worker or per choice; all arrays have one shape. Size 0 means no samples. Sums
    over a curve are cached, because a search repeats them.
    """

    size: IntArray
    full: IntArray
    rest: IntArray
    _known: dict[tuple[str, int], tuple[Curve, FloatArray]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, samples: npt.ArrayLike, micro_batch: npt.ArrayLike) -> Self:
        """Cut `samples` into micro-batches of at most `micro_batch`, only the last one smaller."""
        b, m = np.broadcast_arrays(np.asarray(samples, np.int64), np.asarray(micro_batch, np.int64))
        size = np.minimum(b, m)
        full = b // np.maximum(size, 1)
        return cls(size=size, full=full, rest=b - full * size)

    @property
    def smallest(self) -> IntArray:
        """Samples of the smallest micro-batch."""
        return np.where(self.rest > 0, self.rest, self.size)

    @property
    def count(self) -> IntArray:
        """Number of micro-batches."""
        return self.full + (self.rest > 0)

    def count_last_by_size(self, number: IntArray) -> tuple[IntArray, IntArray]:
        """Return how many of the last `number` micro-batches have `size` and `rest` samples."""
        rest = np.where(self.rest > 0, np.minimum(number, 1), 0)
        return number - rest, rest

    def seconds(self, curve: Curve) -> FloatArray:
        """Return the seconds of all micro-batches together."""
        return self._once("all", curve, lambda: self.over_all(partial(interpolate_seconds, curve)))

    def smallest_seconds(self, curve: Curve) -> FloatArray:
        """Return the seconds of the smallest micro-batch."""
        at = partial(interpolate_seconds, curve)
        return self._once("smallest", curve, lambda: self._looked_up(at)(self.smallest))

    def largest_seconds(self, curve: Curve) -> FloatArray:
        """Return the seconds of the largest micro-batch."""
        at = partial(interpolate_seconds, curve)
        return self._once("longest", curve, lambda: self._looked_up(at)(self.size))

    def bytes(self, curve: Curve) -> FloatArray:
        """Return the bytes of all micro-batches together."""
        return self._once("bytes", curve, lambda: self.over_all(partial(interpolate_bytes, curve)))

    def largest_bytes(self, curve: Curve) -> FloatArray:
        """Return the bytes of the largest micro-batch: micro-batches run one after another."""
        at = partial(interpolate_bytes, curve)
        return self._once("largest", curve, lambda: self._looked_up(at)(self.size))

    def over_all(self, value_at: ValuesAt) -> FloatArray:
        """Sum the value at each size over micro-batches."""
        at = self._looked_up(value_at)
        return self.full * at(self.size) + at(self.rest)

    def _looked_up(self, value_at: ValuesAt) -> ValuesAt:
        """Return a table lookup for `value_at` where many values of few sizes are needed."""
        if self._most >= self.size.size:
            return value_at
        table = value_at(np.arange(self._most + 1))
        return lambda sizes: table[sizes]

    @cached_property
    def _most(self) -> int:
        """Size of the largest micro-batch over all entries."""
        return int(self.size.max(initial=0))

    def _once(self, what: str, curve: Curve, make: Callable[[], FloatArray]) -> FloatArray:
        key = (what, id(curve))  # hashing a curve reads all points; the cache keeps the id alive
        if key not in self._known:
            self._known[key] = curve, make()
        return self._known[key][1]
