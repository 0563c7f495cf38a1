"""Feasibility of a plan: can the devices hold all of the state and compute all of the batch?

Under limits on time, a class has a *staircase*: the more samples a device takes, the smaller the
state share it has room for. Each device gets one step; fewer samples than the step allows are
always possible. The question is a knapsack in each pool: shares adding up to 1, and samples adding
up to the batch over all pools. A linear relaxation, counting the devices of a class, nearly always
answers at once; a dynamic program decides the rest exactly where small enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gpumix.cost.memory_layout.curves import FloatArray, IntArray
from gpumix.planner.data_parallel.class_options import TOLERANCE, PoolMember, PoolOptions

FULL_STATE_SHARE = 1.0 - TOLERANCE  # shares adding up to this hold all of the state

MOST_CELLS = 4_000_000  # of the dynamic program: devices x samples x steps

# A step and the number of devices on it; the runs of a class; the runs of all classes.
Run = tuple[int, int]
Runs = tuple[Run, ...]
Selection = tuple[Runs, ...]


class Undecided(Exception):
    """The relaxation allows a selection, but the exact answer would take too long."""


@dataclass(frozen=True)
class Staircase:
    """Steps of each of `devices` like devices: growing `samples`, falling `share`."""

    devices: int
    samples: IntArray
    share: FloatArray

    @classmethod
    def of(cls, devices: int, samples: IntArray, capacity: FloatArray) -> Staircase:
        """Keep the steps not covered by a step of at least as many samples and as much room."""
        most = np.maximum.accumulate(capacity[::-1])[::-1]
        corner = most >= 0
        corner[:-1] &= most[1:] < most[:-1]
        return cls(devices, samples[corner], most[corner])


@dataclass(frozen=True)
class Move:
    """A move of devices of class `index` to the next step of the concave hull."""

    price: float
    index: int
    start: int
    end: int


def build_staircase(member: PoolMember, room: FloatArray, optimizer_s: float) -> Staircase:
    """Return the staircase of a class in a pool, with `room` next to each row of samples and a
    limit on the update; no steps if nothing is allowed."""
    share = np.minimum(room, member.options.most_share(optimizer_s))
    return Staircase.of(member.devices, member.options.rows, share)


def select_in_pools(
    pools: Sequence[PoolOptions], stairs: Sequence[Sequence[Staircase]], batch: int
) -> tuple[Selection, ...] | None:
    """Return a step for every device of every kind of pool, such that samples reach `batch` over
    all pools and shares reach 1 in each; None if impossible.

    Raises:
        Undecided: the answer would take too long.
    """
    if len(pools) == 1 and pools[0].alike == 1:
        selection = select_steps(stairs[0], batch)
        return None if selection is None else (selection,)
    if any(select_steps(row, 0) is None for row in stairs):
        return None
    found = [_most_samples(row) for row in stairs]
    chosen = tuple(selection for selection, _ in found)
    reached = sum(
        pool.alike * _sum_samples(row, selection)
        for pool, row, selection in zip(pools, stairs, chosen)
    )
    if reached >= batch:
        return chosen
    if all(certain for _, certain in found):
        return None
    raise Undecided


def _most_samples(stairs: Sequence[Staircase]) -> tuple[Selection, bool]:
    """Return a pool's steps with the most samples, and True if certain. The state must fit."""
    best = select_steps(stairs, 0)
    assert best is not None
    low, high, certain = 0, sum(s.devices * int(s.samples[-1]) for s in stairs), True
    while low < high:
        middle = (low + high + 1) // 2
        try:
            found = select_steps(stairs, middle)
        except Undecided:
            found, certain = None, False
        if found is None:
            high = middle - 1
        else:
            best, low = found, max(middle, _sum_samples(stairs, found))
    return best, certain


def select_steps(stairs: Sequence[Staircase], batch: int) -> Selection | None:
    """Return a step for every device, with samples reaching `batch` and shares 1, or None.

    Raises:
        Undecided: the answer would take too long.
    """
    if any(not len(s.samples) for s in stairs):
        return None
    if sum(s.devices * int(s.samples[-1]) for s in stairs) < batch:
        return None
    if sum(s.devices * float(s.share[0]) for s in stairs) < FULL_STATE_SHARE:
        return None
    last = tuple(((len(s.samples) - 1, s.devices),) for s in stairs)
    if _sum_shares(stairs, last) >= FULL_STATE_SHARE:
        return last
    bound, rounded = _solve_relaxation(stairs, batch)
    if bound < FULL_STATE_SHARE:
        return None
    if _sum_shares(stairs, rounded) >= FULL_STATE_SHARE:
        return rounded
    if sum(s.devices * len(s.samples) for s in stairs) * batch > MOST_CELLS:
        raise Undecided
    return _solve_exactly(stairs, batch)


def _sum_shares(stairs: Sequence[Staircase], chosen: Selection) -> float:
    return sum(
        count * float(s.share[step]) for s, runs in zip(stairs, chosen) for step, count in runs
    )


def _sum_samples(stairs: Sequence[Staircase], chosen: Selection) -> int:
    return sum(
        count * int(s.samples[step]) for s, runs in zip(stairs, chosen) for step, count in runs
    )


def _solve_relaxation(stairs: Sequence[Staircase], batch: int) -> tuple[float, Selection]:
    """Return an upper bound of the sum of shares, and a selection near the bound.

    Devices begin at the roomiest step and move along the concave hull of the staircase, the
    cheapest move (least share lost per sample gained) first. The bound makes the last move in part,
    the selection in full.
    """
    chosen: list[list[Run]] = [[(0, s.devices)] for s in stairs]
    missing = batch - sum(s.devices * int(s.samples[0]) for s in stairs)
    bound = sum(s.devices * float(s.share[0]) for s in stairs)
    moves = sorted(
        (move for index, s in enumerate(stairs) for move in _iterate_hull_moves(index, s)),
        key=lambda m: (m.price, m.index, m.start),
    )
    for move in moves:
        if missing <= 0:
            break
        stair = stairs[move.index]
        gain = int(stair.samples[move.end] - stair.samples[move.start])
        whole = min(stair.devices, missing // gain)
        bound -= move.price * gain * whole
        missing -= gain * whole
        runs = [(move.end, whole)]
        if missing > 0 and whole < stair.devices:
            bound -= move.price * missing
            need = int(stair.samples[move.start]) + missing
            runs.append((int(np.searchsorted(stair.samples, need)), 1))
            missing = 0
        left = stair.devices - sum(count for _, count in runs)
        chosen[move.index] = [run for run in (*runs, (move.start, left)) if run[1]]
    return bound, tuple(map(tuple, chosen))


def _iterate_hull_moves(index: int, stair: Staircase) -> Iterator[Move]:
    """Yield the moves along the upper concave hull of a staircase, cheapest first."""
    x, y = stair.samples.tolist(), stair.share.tolist()
    corners: list[int] = []
    for point in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[point] - x[a]) > (y[point] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(point)
    price = 0.0
    for a, b in pairwise(corners):
        # On a straight line, rounding alone would decide which move comes first.
        price = max(price, (y[a] - y[b]) / (x[b] - x[a]))
        yield Move(price, index, a, b)


def _tables(stairs: Sequence[Staircase], batch: int) -> list[FloatArray]:
    """Return, after each device, the largest sum of shares so far for at least j samples."""
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


def _solve_exactly(stairs: Sequence[Staircase], batch: int) -> Selection | None:
    """Return the selection with the largest sum of shares, by dynamic programming, or None."""
    tables = _tables(stairs, batch)
    if tables[-1][batch] < FULL_STATE_SHARE:
        return None
    chosen: list[Runs] = [()] * len(stairs)
    missing, place = batch, len(tables) - 1
    for index in reversed(range(len(stairs))):
        stair, steps = stairs[index], []
        for _ in range(stair.devices):
            place -= 1
            left = np.maximum(missing - stair.samples, 0)
            step = int(np.argmax(tables[place][left] + stair.share))
            steps.append(step)
            missing = int(left[step])
        chosen[index] = tuple((step, steps.count(step)) for step in sorted(set(steps))[::-1])
    return tuple(chosen)
