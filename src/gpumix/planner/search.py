"""The fastest choice for all devices at once: branch and bound over two limits on time.

The step is the sum of three maxima: the longest forward, the longest backward, the longest update.
Once the limits of the two passes are fixed, `knapsack.select` tells whether batch and state find
room within a limit on the update. So the search is over boxes of pairs of limits: the lower corner
of a box bounds its steps from below, the upper corner is the most that its limits allow. A box is
dropped when its upper corner cannot beat the best choice even at the price of its lower corner,
and halved otherwise; a box of one pair is settled by bisection over the update.

The result is exact: no choice is faster by more than one part in 10^10.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpumix.cost.curves import FloatArray
from gpumix.planner.knapsack import select, staircase
from gpumix.planner.options import TOLERANCE, ClassOptions, Limits

IMPROVEMENT = 1e-10

# The sum at its lower corner; first and last forward limit, first and last backward limit.
Box = tuple[float, int, int, int, int]


@dataclass(frozen=True)
class Choice:
    """The most samples that each device of each class may take, and limits that then hold."""

    samples: tuple[tuple[int, ...], ...]
    limits: Limits


def fastest(options: Sequence[ClassOptions], batch: int) -> Choice | None:
    """The choice with the least sum of limits; None if memory allows no choice at all."""
    return _Search(options, batch).run()


def level(most: FloatArray, speed: FloatArray) -> float:
    """The least x at which min(most, x * speed) adds up to 1; all of `most` must reach 1.

    With `most` in shares and `speed` in shares per second this is the time of the update; with
    speed 1 it is the height to which shares are filled.
    """
    free = np.isinf(speed)
    left = 1.0 - float(most[free].sum())
    if left <= TOLERANCE:
        return 0.0
    most, speed = most[~free], speed[~free]
    full = most / speed
    order = np.argsort(full, kind="stable")
    moving = float(speed.sum())
    for index in order:
        if left <= full[index] * moving * (1.0 + TOLERANCE):
            return left / moving
        left -= float(most[index])
        moving -= float(speed[index])
    return float(full.max(initial=0.0))


def update_speed(options: Sequence[ClassOptions]) -> FloatArray:
    """Shares per second that each device updates; infinite where the update takes no time."""
    return np.repeat(
        [1.0 / o.optimizer_s if o.optimizer_s > 0 else np.inf for o in options],
        [o.devices for o in options],
    )


class _Search:
    """One search: the values that the two limits can take, and the best choice so far."""

    def __init__(self, options: Sequence[ClassOptions], batch: int) -> None:
        self.options = options
        self.batch = batch
        self.speed = update_speed(options)
        self.forward: FloatArray = np.unique(np.concatenate([o.forward_s for o in options]))
        self.backward: FloatArray = np.unique(np.concatenate([o.backward_s for o in options]))
        self.best = Choice((), Limits())

    def run(self) -> Choice | None:
        if not self.ask(Limits()):
            return None
        low_f = self._least(self.forward, lambda t: Limits(forward_s=t))
        low_b = self._least(self.backward, lambda t: Limits(backward_s=t))
        update = self._least_update()
        boxes = [self._box(low_f, len(self.forward) - 1, low_b, len(self.backward) - 1)]
        while boxes:
            low, f0, f1, b0, b1 = heapq.heappop(boxes)
            budget = self._target() - low
            if budget < update:
                break
            if not self.ask(Limits(self.forward[f1], self.backward[b1], budget)):
                continue
            if f0 == f1 and b0 == b1:
                self._settle(self.forward[f0], self.backward[b0], update)
                continue
            for half in self._halves(f0, f1, b0, b1):
                heapq.heappush(boxes, half)
        return self.best

    def ask(self, limits: Limits) -> bool:
        """Whether a choice within `limits` exists; if it is the best so far it is remembered."""
        stairs = [staircase(options, limits) for options in self.options]
        selection = select(stairs, self.batch)
        if selection is None:
            return False
        samples = tuple(
            tuple(int(stair.samples[step]) for step in steps)
            for stair, steps in zip(stairs, selection)
        )
        choice = Choice(samples, self._attained(samples, limits))
        if choice.limits.total_s < self.best.limits.total_s:
            self.best = choice
        return True

    def _attained(self, samples: tuple[tuple[int, ...], ...], limits: Limits) -> Limits:
        """What a selection really takes: its limits are often lower than those it was found in."""
        most = np.concatenate(
            [o.capacity_of(counts, limits) for o, counts in zip(self.options, samples)]
        )
        update = level(most, self.speed)
        forward = backward = 0.0
        device = iter(most.tolist())
        picked = {
            (index, count, min(next(device), options.most_share(update)))
            for index, (options, counts) in enumerate(zip(self.options, samples))
            for count in counts
        }
        for index, count, share in picked:
            option = self.options[index].pick(count, share, limits)
            forward = max(forward, float(self.options[index].forward_s[option]))
            backward = max(backward, float(self.options[index].backward_s[option]))
        return Limits(forward, backward, update)

    def _settle(self, forward_s: float, backward_s: float, low: float) -> None:
        """Find the least update at one pair of limits, as far as it beats the best choice."""
        while (high := self._target() - forward_s - backward_s) > low:
            if not self.ask(Limits(forward_s, backward_s, high)):
                return
            middle = (low + min(high, self._target() - forward_s - backward_s)) / 2
            if not self.ask(Limits(forward_s, backward_s, middle)):
                low = middle

    def _target(self) -> float:
        """A choice must take no longer than this to count as better than the best."""
        return self.best.limits.total_s * (1.0 - IMPROVEMENT)

    def _least_update(self) -> float:
        """No update is shorter: it has all the memory that is free without samples."""
        roomiest = [float(options.capacity.max()) for options in self.options]
        return level(np.repeat(roomiest, [o.devices for o in self.options]), self.speed)

    def _least(self, values: FloatArray, limits: Callable[[float], Limits]) -> int:
        """The place of the least of `values` that allows a choice if nothing else is limited."""
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if self.ask(limits(float(values[middle]))):
                high = middle
            else:
                low = middle + 1
        return low

    def _box(self, f0: int, f1: int, b0: int, b1: int) -> Box:
        return (float(self.forward[f0] + self.backward[b0]), f0, f1, b0, b1)

    def _halves(self, f0: int, f1: int, b0: int, b1: int) -> tuple[Box, Box]:
        """Two boxes, cut across the side that spans more seconds."""
        wide = self.forward[f1] - self.forward[f0]
        if wide >= self.backward[b1] - self.backward[b0]:
            middle = (f0 + f1) // 2
            return self._box(f0, middle, b0, b1), self._box(middle + 1, f1, b0, b1)
        middle = (b0 + b1) // 2
        return self._box(f0, f1, b0, middle), self._box(f0, f1, middle + 1, b1)
