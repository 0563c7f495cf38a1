"""Can the devices hold the whole state and still compute the whole batch?

Under limits on time a class has a *staircase*: the more samples a device takes, the less of the
state it has room for. Each device gets one step; fewer samples than its step allows are always
possible. The question is a knapsack: shares that add up to 1, samples that add up to the batch.
A linear relaxation answers it nearly always, at once; a dynamic programme decides the rest exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gpumix.cost.curves import FloatArray, IntArray
from gpumix.planner.options import TOLERANCE, ClassOptions, Limits

WHOLE = 1.0 - TOLERANCE  # shares that add up to this hold the whole state

# For each class the step of each of its devices.
Selection = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Staircase:
    """What one of `devices` like devices can do: growing `samples`, falling `share`."""

    devices: int
    samples: IntArray
    share: FloatArray

    @classmethod
    def of(cls, devices: int, samples: IntArray, capacity: FloatArray) -> Staircase:
        """Keep the steps that no other one with as many samples and as much room covers."""
        most = np.maximum.accumulate(capacity[::-1])[::-1]
        corner = (most >= 0) & np.append(most[1:] < most[:-1], True)[: len(most)]
        return cls(devices, samples[corner], most[corner])


@dataclass(frozen=True)
class Move:
    """Devices of class `index` go from one step of the concave hull to the next."""

    price: float
    index: int
    start: int
    end: int


def staircase(options: ClassOptions, limits: Limits) -> Staircase:
    """The staircase of a class under `limits`; without steps where nothing is allowed."""
    room = options.capacity_by_row(limits)
    share = np.minimum(room, options.most_share(limits.optimizer_s))
    return Staircase.of(options.devices, options.rows, share)


def select(stairs: Sequence[Staircase], batch: int) -> Selection | None:
    """A step for every device such that samples reach `batch` and shares reach 1; None if none."""
    if any(not len(s.samples) for s in stairs):
        return None
    if sum(s.devices * int(s.samples[-1]) for s in stairs) < batch:
        return None
    if sum(s.devices * float(s.share[0]) for s in stairs) < WHOLE:
        return None
    last = tuple((len(s.samples) - 1,) * s.devices for s in stairs)
    if _share_of(stairs, last) >= WHOLE:
        return last
    bound, rounded = _relaxed(stairs, batch)
    if bound < WHOLE:
        return None
    if _share_of(stairs, rounded) >= WHOLE:
        return rounded
    return _exact(stairs, batch)


def _share_of(stairs: Sequence[Staircase], chosen: Selection) -> float:
    return sum(float(s.share[list(steps)].sum()) for s, steps in zip(stairs, chosen))


def _relaxed(stairs: Sequence[Staircase], batch: int) -> tuple[float, Selection]:
    """An upper bound of the sum of shares, and a selection that comes near it.

    Devices begin at their roomiest step and move along the concave hull of their staircase, the
    cheapest move (least share lost per sample gained) first. The bound cuts the last move short;
    the selection makes it whole.
    """
    chosen = [[0] * s.devices for s in stairs]
    missing = batch - sum(s.devices * int(s.samples[0]) for s in stairs)
    bound = sum(s.devices * float(s.share[0]) for s in stairs)
    moves = sorted(
        (move for index, s in enumerate(stairs) for move in _hull(index, s)),
        key=lambda m: (m.price, m.index, m.start),
    )
    for move in moves:
        stair = stairs[move.index]
        gain = int(stair.samples[move.end] - stair.samples[move.start])
        for device in range(stair.devices):
            if missing <= 0:
                return bound, tuple(map(tuple, chosen))
            bound -= move.price * min(gain, missing)
            need = int(stair.samples[move.start]) + min(gain, missing)
            chosen[move.index][device] = int(np.searchsorted(stair.samples, need))
            missing -= gain
    return bound, tuple(map(tuple, chosen))


def _hull(index: int, stair: Staircase) -> Iterator[Move]:
    """The moves along the upper concave hull of a staircase, cheapest first."""
    x, y = stair.samples.tolist(), stair.share.tolist()
    corners: list[int] = []
    for point in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[point] - x[a]) > (y[point] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(point)
    for a, b in pairwise(corners):
        yield Move((y[a] - y[b]) / (x[b] - x[a]), index, a, b)


def _tables(stairs: Sequence[Staircase], batch: int) -> list[FloatArray]:
    """After each device: the largest sum of shares so far that allows at least j samples."""
    tables = [np.concatenate(([0.0], np.full(batch, -np.inf)))]
    for stair in stairs:
        for _ in range(stair.devices):
            before, after = tables[-1], np.full(batch + 1, -np.inf)
            for samples, share in zip(stair.samples.tolist(), stair.share.tolist()):
                some = min(samples, batch)
                np.maximum(after[: some + 1], before[0] + share, out=after[: some + 1])
                np.maximum(after[some:], before[: batch + 1 - some] + share, out=after[some:])
            tables.append(after)
    return tables


def _exact(stairs: Sequence[Staircase], batch: int) -> Selection | None:
    """The selection with the largest sum of shares, by dynamic programming; None if below 1."""
    tables = _tables(stairs, batch)
    if tables[-1][batch] < WHOLE:
        return None
    chosen: list[list[int]] = [[] for _ in stairs]
    missing, place = batch, len(tables) - 1
    for index in reversed(range(len(stairs))):
        stair = stairs[index]
        for _ in range(stair.devices):
            place -= 1
            left = np.maximum(missing - stair.samples, 0)
            step = int(np.argmax(tables[place][left] + stair.share))
            chosen[index].append(step)
            missing = int(left[step])
    return tuple(tuple(sorted(steps, reverse=True)) for steps in chosen)
