"""The fastest choice for all devices at once: branch and bound over two limits on time.

The step is the sum of three maxima: the longest forward, the longest backward, the longest update.
With the limits of the two passes fixed, `knapsack.select` decides if batch and state fit within a
limit on the update. So the search is over boxes of pairs of limits: the lower corner of a box
bounds its steps from below, the upper corner has the widest limits. A box is dropped when its upper
corner cannot beat the best choice even at the price of its lower corner, and halved otherwise; a
box of one pair is settled by bisection over the update.

Choices better by less than `gap` are not searched for, so the best choice is within `gap` of the
optimum: one part in 10^10 for small problems.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpumix.cost.memory_layout.curves import FloatArray
from gpumix.planner.data_parallel.class_options import (
    TOLERANCE,
    ClassOptions,
    PoolOptions,
    TimeLimits,
)
from gpumix.planner.data_parallel.knapsack import Undecided, build_staircase, select_in_pools

EXACT_GAP = 1e-10

# The sum at the lower corner; first and last forward limit, first and last backward limit.
Box = tuple[float, int, int, int, int]

# For each kind of pool and each class of the pool: runs of most samples and number of devices.
Samples = tuple[tuple[tuple[tuple[int, int], ...], ...], ...]


@dataclass(frozen=True)
class SampleLimits:
    """The most samples that each device may take, and the limits attained.

    No choice takes less than `bound_s`.
    """

    samples: Samples
    limits: TimeLimits
    bound_s: float = 0.0


def find_fastest_choice(
    pools: Sequence[PoolOptions],
    batch: int,
    gap: float = EXACT_GAP,
    most_s: float = float("inf"),
) -> SampleLimits | None:
    """Return the choice with the least sum of limits, within `gap`; None if memory allows none of
    at most `most_s`."""
    return _Search(pools, batch, gap, most_s * (1.0 + TOLERANCE)).run()


def find_fill_level(most: FloatArray, speed: FloatArray, count: FloatArray | None = None) -> float:
    """Return the least x at which `count` times min(most, x * speed) adds up to 1, if all reach 1.

    With `most` in shares and `speed` in shares per second, x is the time of the update; with speed
    1, x is the level to which shares are filled.
    """
    count = np.ones(len(most)) if count is None else count
    free = np.isinf(speed)
    left = 1.0 - float((most * count)[free].sum())
    if left <= TOLERANCE:
        return 0.0
    most, speed, count = most[~free], speed[~free], count[~free]
    full = most / speed
    order = np.argsort(full, kind="stable")
    moving = float((speed * count).sum())
    for index in order:
        if left <= full[index] * moving * (1.0 + TOLERANCE):
            return left / moving
        left -= float(most[index] * count[index])
        moving -= float(speed[index] * count[index])
    return float(full.max(initial=0.0))


class _Search:
    """A search: the possible values of both limits, and the best choice so far."""

    def __init__(self, pools: Sequence[PoolOptions], batch: int, gap: float, most_s: float) -> None:
        self.pools = pools
        self.most_s = most_s
        self.batch = batch
        self.gap = gap
        options = {m.options.name: m.options for pool in pools for m in pool.members}.values()
        self.forward: FloatArray = np.unique(np.concatenate([o.forward_s for o in options]))
        self.backward: FloatArray = np.unique(np.concatenate([o.backward_s for o in options]))
        self.best = SampleLimits((), TimeLimits())
        self.undecided_s = float("inf")  # least seconds of an undecided choice

    def run(self) -> SampleLimits | None:
        if not self._find_choice(TimeLimits()):
            return None
        reach_f = self._find_least_reaching(self.forward, lambda o: o.least_forward_s)
        reach_b = self._find_least_reaching(self.backward, lambda o: o.least_backward_s)
        low_f = self._least(self.forward, reach_f, lambda t: TimeLimits(forward_s=t))
        low_b = self._least(self.backward, reach_b, lambda t: TimeLimits(backward_s=t))
        update = self._least_update()
        boxes = [self._box(low_f, len(self.forward) - 1, low_b, len(self.backward) - 1)]
        while boxes:
            low, f0, f1, b0, b1 = heapq.heappop(boxes)
            budget = self._target() - low
            if budget < update:
                break
            answer = self._find_choice(TimeLimits(self.forward[f1], self.backward[b1], budget))
            if answer is False:
                continue
            if f0 == f1 and b0 == b1:
                self._settle(self.forward[f0], self.backward[b0], update)
                continue
            for half in self._halves(f0, f1, b0, b1):
                heapq.heappush(boxes, half)
        if self.best.limits.total_s > self.most_s and self.undecided_s == float("inf"):
            return None
        # Dropped boxes could not beat the target, which only fell since.
        bound = min(self.undecided_s, self._target())
        return SampleLimits(self.best.samples, self.best.limits, bound)

    def _find_choice(self, limits: TimeLimits) -> bool | None:
        """Return True if a choice exists within `limits`, None if undecided; keep the best."""
        rooms = [[m.room_by_row(limits) for m in pool.members] for pool in self.pools]
        stairs = [
            [build_staircase(m, room, limits.optimizer_s) for m, room in zip(pool.members, row)]
            for pool, row in zip(self.pools, rooms)
        ]
        try:
            selection = select_in_pools(self.pools, stairs, self.batch)
        except Undecided:
            return None
        if selection is None:
            return False
        samples = tuple(
            tuple(
                tuple((int(stair.samples[step]), count) for step, count in runs)
                for stair, runs in zip(row, chosen)
            )
            for row, chosen in zip(stairs, selection)
        )
        if self._bound_passes(samples) >= self.best.limits.total_s:
            return True
        choice = self._tighten_limits(samples, rooms, limits)
        if choice.limits.total_s < self.best.limits.total_s:
            self.best = choice
        return True

    def _bound_passes(self, samples: Samples) -> float:
        """Return a lower bound of the passes with `samples`, in any micro-batches and modes."""
        forward = backward = 0.0
        for pool, row in zip(self.pools, samples):
            for member, runs in zip(pool.members, row):
                options = member.options
                for count, _ in runs:
                    place = options.rows.searchsorted(count)
                    forward = max(forward, float(options.least_forward_s[place]))
                    backward = max(backward, float(options.least_backward_s[place]))
        return forward + backward

    def _tighten_limits(
        self, samples: Samples, by_row: Sequence[Sequence[FloatArray]], limits: TimeLimits
    ) -> SampleLimits:
        """Return the choice with the limits attained, often lower than the limits of the search."""
        rooms = [
            np.concatenate(
                [
                    room[np.searchsorted(m.options.rows, [n for n, _ in runs])]
                    for m, room, runs in zip(pool.members, rooms_of_pool, row)
                ]
            )
            for pool, rooms_of_pool, row in zip(self.pools, by_row, samples)
        ]
        update = max(
            find_fill_level(
                room, _speeds(pool, row), np.asarray([c for runs in row for _, c in runs], float)
            )
            for pool, row, room in zip(self.pools, samples, rooms)
        )
        forward = backward = 0.0
        for pool, row, room in zip(self.pools, samples, rooms):
            left = iter(room.tolist())
            for member, runs in zip(pool.members, row):
                for count, _ in runs:
                    share = min(next(left), member.options.most_share(update))
                    option = member.options.pick(count, share, limits)
                    forward = max(forward, float(member.options.forward_s[option]))
                    backward = max(backward, float(member.options.backward_s[option]))
        return SampleLimits(samples, TimeLimits(forward, backward, update))

    def _settle(self, forward_s: float, backward_s: float, low: float) -> None:
        """Find the least update at one pair of limits, if better than the best choice."""
        while (high := self._target() - forward_s - backward_s) > low:
            if not self._has_choice(TimeLimits(forward_s, backward_s, high), low):
                return
            middle = (low + min(high, self._target() - forward_s - backward_s)) / 2
            if not self._has_choice(TimeLimits(forward_s, backward_s, middle), low):
                low = middle

    def _has_choice(self, limits: TimeLimits, low: float) -> bool:
        """Return True if a choice exists; if undecided, note a possible choice from `low` on."""
        answer = self._find_choice(limits)
        if answer is None:
            least = limits.forward_s + limits.backward_s + low
            self.undecided_s = min(self.undecided_s, least)
        return bool(answer)

    def _target(self) -> float:
        """Return the most seconds of a choice better than the best."""
        return min(self.most_s, self.best.limits.total_s * (1.0 - self.gap))

    def _least_update(self) -> float:
        """Return a lower bound of the update: all memory free without samples is for state."""
        return max(
            find_fill_level(
                np.asarray([min(m.cap, float(m.options.capacity.max())) for m in pool.members]),
                np.asarray([m.options.update_speed for m in pool.members]),
                np.asarray([m.devices for m in pool.members], float),
            )
            for pool in self.pools
        )

    def _find_least_reaching(
        self, values: FloatArray, least: Callable[[ClassOptions], FloatArray]
    ) -> int:
        """Return the place of the least of `values` allowing the whole batch, memory aside."""
        reached = np.zeros(len(values))
        for pool in self.pools:
            for member in pool.members:
                options, seconds = member.options, least(member.options)
                order = np.argsort(seconds, kind="stable")
                most = np.maximum.accumulate(options.rows[order])
                done = np.searchsorted(seconds[order], values * (1.0 + TOLERANCE), side="right")
                each = np.where(done > 0, most[done - 1], -np.inf)
                reached += pool.alike * member.devices * each
        return min(int(np.searchsorted(reached, self.batch)), len(values) - 1)

    def _least(self, values: FloatArray, low: int, limits: Callable[[float], TimeLimits]) -> int:
        """Return the place of the least of `values` from `low` on that may allow a choice, with
        nothing else limited."""
        high = len(values) - 1
        middle = low  # the answer if there is room
        while low < high:
            if self._find_choice(limits(float(values[middle]))) is False:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return low

    def _box(self, f0: int, f1: int, b0: int, b1: int) -> Box:
        return (float(self.forward[f0] + self.backward[b0]), f0, f1, b0, b1)

    def _halves(self, f0: int, f1: int, b0: int, b1: int) -> tuple[Box, Box]:
        """Split a box across the side of more seconds."""
        wide = self.forward[f1] - self.forward[f0]
        if wide >= self.backward[b1] - self.backward[b0]:
            middle = (f0 + f1) // 2
            return self._box(f0, middle, b0, b1), self._box(middle + 1, f1, b0, b1)
        middle = (b0 + b1) // 2
        return self._box(f0, f1, b0, middle), self._box(f0, f1, middle + 1, b1)


def _speeds(pool: PoolOptions, row: tuple[tuple[tuple[int, int], ...], ...]) -> FloatArray:
    """Return the shares per second of each run of like devices."""
    return np.asarray([m.options.update_speed for m, runs in zip(pool.members, row) for _ in runs])
