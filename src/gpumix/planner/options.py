"""What a device of a class can do: every number of samples with every micro-batch.

An option is (samples, micro-batch) with its forward and backward seconds and its *capacity*, the
largest state share it leaves room for. Options that another one beats in all of these are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpumix.cost.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.memory import free_bytes
from gpumix.cost.network import Links, free_links
from gpumix.cost.time import backward_seconds, forward_seconds, optimizer_seconds
from gpumix.planner.base import Setting

# Sums in another order differ in the last digits; limits are compared with this much slack.
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Limits:
    """The longest that any device may take for each part of a step, in seconds."""

    forward_s: float = float("inf")
    backward_s: float = float("inf")
    optimizer_s: float = float("inf")

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class ClassOptions:
    """The options of one class by growing samples, one array entry each.

    `busy_s` is the time without communication: it decides between options that are equally good.
    `optimizer_s` is what one device would need for the whole state. `starts` is where each of the
    distinct sample counts `rows` begins.
    """

    name: str
    devices: int
    optimizer_s: float
    samples: IntArray
    micro_batch: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    busy_s: FloatArray
    capacity: FloatArray
    rows: IntArray
    starts: IntArray

    def allowed(self, limits: Limits) -> npt.NDArray[np.bool_]:
        """Which options keep to the limits of the two passes."""
        slack = 1.0 + TOLERANCE
        return (self.forward_s <= limits.forward_s * slack) & (
            self.backward_s <= limits.backward_s * slack
        )

    def capacity_by_row(self, limits: Limits) -> FloatArray:
        """The largest capacity for each of `rows`; -1 where no option is allowed."""
        if not len(self.rows):
            return np.zeros(0)
        return np.maximum.reduceat(np.where(self.allowed(limits), self.capacity, -1.0), self.starts)

    def capacity_of(self, counts: Sequence[int], limits: Limits) -> FloatArray:
        """The largest capacity of an allowed option for each of these sample counts."""
        return self.capacity_by_row(limits)[np.searchsorted(self.rows, counts)]

    def most_share(self, optimizer_s: float) -> float:
        """The largest share that a device updates in so many seconds."""
        if self.optimizer_s == 0:
            return 1.0
        return min(1.0, optimizer_s * (1.0 + TOLERANCE) / self.optimizer_s)

    def pick(self, samples: int, share: float, limits: Limits) -> int:
        """The least busy allowed option with so many samples and room for `share`.

        Ties go to the smaller micro-batch. The caller knows that there is one.
        """
        row = int(np.searchsorted(self.rows, samples))
        end = self.starts[row + 1] if row + 1 < len(self.starts) else len(self.samples)
        span = slice(int(self.starts[row]), int(end))
        good = self.allowed(limits)[span] & (self.capacity[span] >= share * (1.0 - TOLERANCE))
        return span.start + int(np.argmin(np.where(good, self.busy_s[span], np.inf)))


def tabulate(
    setting: Setting,
    name: str,
    *,
    batch: int,
    sizes: IntArray,
    within_s: float,
) -> ClassOptions:
    """The options of class `name` with micro-batches of `sizes`, for up to `batch` samples.

    Options that take longer than `within_s` for both passes are left out. Where shares are to be
    equal, an option must have room for one, and more room is worth nothing.
    """
    devices = len(setting.classes[name])
    times = setting.profile.of_class(name).units
    model = setting.profile.model
    micro_batch, samples = np.meshgrid(sizes, np.arange(batch + 1))
    micro = MicroBatches.of(samples, micro_batch)

    def seconds(links: Links) -> tuple[FloatArray, FloatArray]:
        return (
            forward_seconds(model, times, links, micro),
            backward_seconds(model, times, links, micro),
        )

    forward, backward = seconds(setting.links)
    busy = np.add(*seconds(free_links(model)))
    capacity = setting.memory.demands(micro).capacity(free_bytes(setting.profile, name))
    if setting.equal_shares:
        share = 1.0 / len(setting.devices)
        capacity = np.where(capacity >= share, share, -1.0)
    # Of the sizes that take all samples at once only the first is an option of its own.
    distinct = np.concatenate(([-1], sizes[:-1])) < samples
    valid = (capacity >= 0) & (forward + backward <= within_s) & distinct
    keep = valid & ~_dominated(valid, capacity, forward, backward, busy)
    rows, starts = np.unique(samples[keep], return_index=True)
    return ClassOptions(
        name=name,
        devices=devices,
        optimizer_s=optimizer_seconds(setting.profile, name),
        samples=samples[keep],
        micro_batch=micro.size[keep],
        forward_s=forward[keep],
        backward_s=backward[keep],
        busy_s=busy[keep],
        capacity=capacity[keep],
        rows=rows,
        starts=starts,
    )


def samples_bound(setting: Setting, name: str, batch: int, within_s: float) -> int:
    """More samples than this a device of class `name` cannot do in `within_s`, however it cuts."""
    times, model = setting.profile.of_class(name).units, setting.profile.model
    sizes = np.arange(1, setting.largest_micro_batch(name, batch) + 1)
    one, free = MicroBatches.of(sizes, sizes), free_links(model)
    busy = forward_seconds(model, times, free, one) + backward_seconds(model, times, free, one)
    per_sample = float((busy / sizes).min())
    return batch if per_sample * batch <= within_s else int(within_s / per_sample)


def _dominated(
    valid: npt.NDArray[np.bool_],
    capacity: FloatArray,
    forward: FloatArray,
    backward: FloatArray,
    busy: FloatArray,
) -> npt.NDArray[np.bool_]:
    """Which options another one with as many samples beats or equals in everything.

    Each row is walked from the largest capacity down. An option is compared with the three before
    it that have the least forward, the least backward and the least busy time: some dominated ones
    are overlooked, which costs only time, but none is dropped wrongly.
    """
    times = [np.where(valid, t, np.inf) for t in (forward, backward, busy)]
    order = np.lexsort((times[2], times[0] + times[1], -np.where(valid, capacity, -1.0)), axis=1)
    walked = [np.take_along_axis(t, order, axis=1) for t in times]
    beaten = np.zeros(valid.shape, dtype=bool)
    for key in walked:
        best = _best_before(key)
        others = [np.take_along_axis(t, np.maximum(best, 0), axis=1) for t in walked]
        beaten |= (best >= 0) & np.all([t >= o for t, o in zip(walked, others)], axis=0)
    result = np.zeros(valid.shape, dtype=bool)
    np.put_along_axis(result, order, beaten, axis=1)
    return result


def _best_before(key: FloatArray) -> IntArray:
    """For each entry of a row the place of the least key before it, -1 for the first."""
    least = np.minimum.accumulate(key, axis=1)
    fresh = np.ones(key.shape, dtype=bool)
    fresh[:, 1:] = key[:, 1:] < least[:, :-1]
    places = np.where(fresh, np.arange(key.shape[1]), -1)
    latest = np.maximum.accumulate(places, axis=1)
    before = np.full(key.shape, -1)
    before[:, 1:] = latest[:, :-1]
    return before
