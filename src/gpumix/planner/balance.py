"""From the limits of the fastest choice to the part of each device.

The limits usually allow more samples than the batch has. The surplus is taken where it balances
best: the time without communication of the busiest device is made as small as possible. The state
is then spread as evenly as room and the update's limit allow, and each device runs the micro-batch
that keeps it least busy. Devices of a class are alike: the first by id gets the most samples.
Ties go by class name, then device id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpumix.cost.curves import FloatArray
from gpumix.planner.base import Part
from gpumix.planner.options import ClassOptions, Limits
from gpumix.planner.search import Choice, level, update_speed

Counts = list[list[int]]  # samples by class, by device


def parts(options: Sequence[ClassOptions], choice: Choice, batch: int) -> list[list[Part]]:
    """The part of each device of each class, in the order of `options`."""
    counts = balanced(options, choice, batch)
    shares = iter(_shares(options, counts, choice.limits).tolist())
    return [
        [_part(o, samples, next(shares), choice.limits) for samples in row]
        for o, row in zip(options, counts)
    ]


def balanced(options: Sequence[ClassOptions], choice: Choice, batch: int) -> Counts:
    """Samples that add up to `batch`, none more than the choice, the busiest device least busy."""
    busy = [_least_busy(o, choice.limits) for o in options]
    levels = np.unique(np.concatenate(busy))
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(map(sum, _within(options, choice, busy, float(levels[middle])))) >= batch:
            high = middle
        else:
            low = middle + 1
    floor = float(levels[low - 1]) if low else -1.0
    counts = _within(options, choice, busy, float(levels[low]))
    return _trimmed(counts, _within(options, choice, busy, floor), batch)


def _least_busy(options: ClassOptions, limits: Limits) -> FloatArray:
    """Seconds without communication for each row of samples, never falling as samples grow."""
    allowed = np.where(options.allowed(limits), options.busy_s, np.inf)
    least: FloatArray = np.minimum.reduceat(allowed, options.starts)
    rising: FloatArray = np.minimum.accumulate(least[::-1])[::-1]
    return rising


def _within(
    options: Sequence[ClassOptions], choice: Choice, busy: Sequence[FloatArray], seconds: float
) -> Counts:
    """The most samples that each device does in `seconds` without exceeding its choice."""
    counts = []
    for o, most, times in zip(options, choice.samples, busy):
        row = int(np.searchsorted(times, seconds, side="right")) - 1
        reach = int(o.rows[row]) if row >= 0 else 0
        counts.append([min(limit, reach) for limit in most])
    return counts


def _trimmed(counts: Counts, floor: Counts, batch: int) -> Counts:
    """Take the surplus one sample a round from each device above its floor, the last first."""
    surplus = sum(map(sum, counts)) - batch
    places = [(c, d) for c, row in enumerate(counts) for d in range(len(row))][::-1]
    while surplus > 0:
        for c, d in places:
            if surplus > 0 and counts[c][d] > floor[c][d]:
                counts[c][d] -= 1
                surplus -= 1
    return [sorted(row, reverse=True) for row in counts]


def _shares(options: Sequence[ClassOptions], counts: Counts, limits: Limits) -> FloatArray:
    """State shares, as even as the room beside the samples and the update's limit allow."""
    room = np.concatenate([o.capacity_of(row, limits) for o, row in zip(options, counts)])
    update = level(room, update_speed(options))
    pace = np.repeat([o.most_share(update) for o in options], [o.devices for o in options])
    most: FloatArray = np.minimum(room, pace)
    return most.clip(max=level(most, np.ones(len(most))))


def _part(options: ClassOptions, samples: int, share: float, limits: Limits) -> Part:
    option = options.pick(samples, share, limits)
    return Part(samples, int(options.micro_batch[option]), share)
