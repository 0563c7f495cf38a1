"""Values between and beyond measured points, and sums over a worker's micro-batches.

Measured points are kept; nothing is fitted. All functions take arrays, so that the planner looks
at every choice of a device class at once and the prediction of one plan uses the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from gpumix.spec.profile import Curve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def values_at(curve: Curve, sizes: npt.ArrayLike) -> FloatArray:
    """The curve at each of `sizes`, in the curve's own unit.

    Measured points are met exactly and joined by straight lines. A point that lies below an earlier
    one is noise and is raised to it, so that more never costs less. Below the first point the value
    stays that of the first (a latency floor); size 0 costs nothing. Beyond the last point the value
    grows in proportion to the size: nothing is taken to get better where nobody has looked.
    """
    wanted = np.asarray(sizes, dtype=np.float64)
    at = np.asarray(curve.sizes, dtype=np.float64)
    value = np.maximum.accumulate(np.asarray(curve.values, dtype=np.float64))
    beyond = value[-1] * (wanted / at[-1])
    inside = np.interp(wanted, at, value)
    return np.where(wanted <= 0, 0.0, np.where(wanted > at[-1], beyond, inside))


def value_at(curve: Curve, size: float) -> float:
    """`values_at` for one size."""
    return float(values_at(curve, size))


@dataclass(frozen=True)
class MicroBatches:
    """How workers cut their samples: `full` micro-batches of `size` and one of `rest` samples.

    One entry per worker or per choice; the arrays have one shape. Size 0 means no samples.
    """

    size: IntArray
    full: IntArray
    rest: IntArray

    @classmethod
    def of(cls, samples: npt.ArrayLike, micro_batch: npt.ArrayLike) -> Self:
        """Cut `samples` into micro-batches of at most `micro_batch`, only the last one smaller."""
        b, m = np.broadcast_arrays(np.asarray(samples, np.int64), np.asarray(micro_batch, np.int64))
        size = np.minimum(b, m)
        full = b // np.maximum(size, 1)
        return cls(size=size, full=full, rest=b - full * size)

    def total(self, curve: Curve) -> FloatArray:
        """Sum of the curve over all micro-batches."""
        table = self._table(curve)
        return self.full * table[self.size] + table[self.rest]

    def largest(self, curve: Curve) -> FloatArray:
        """The curve at the largest micro-batch: they run one after the other."""
        return self._table(curve)[self.size]

    def _table(self, curve: Curve) -> FloatArray:
        return values_at(curve, np.arange(int(self.size.max(initial=0)) + 1))
