"""Whose gradients stand out in a step, of ranks whose gradients are noisy all the time.

A rank's own gradient, before it is summed with those of others, is measured against its own last
steps: ranks differ in their number of samples, and runs in how noisy they are. When all ranks jump
at once that is training, not a device. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW_STEPS = 32
# Before so many steps nobody knows what is usual.
KNOWN_STEPS = 16
SPIKE = 10.0  # times what is usual
QUIET = 3.0  # the others are no more than that


@dataclass(frozen=True)
class Spike:
    """A rank's norm in times of its usual one, and the median of the others'."""

    rank: int
    times: float
    others: float


class Spikes:
    """Looks at one step after the other."""

    def __init__(self) -> None:
        self._usual: dict[int, deque[float]] = {}

    def after_step(self, norms: Sequence[float], counts: Sequence[float]) -> list[Spike]:
        """Of a step the spikes.

        Args:
            norms: of what each rank had of the gradient of the mean loss of all.
            counts: how many losses it was made of; those without any have no gradient.
        """
        total = sum(counts)
        shares = {rank: count / total for rank, count in enumerate(counts) if count}
        means = {rank: norms[rank] / share for rank, share in shares.items()}
        times = {
            rank: mean / usual
            for rank, mean in means.items()
            if (usual := self._usual_of(rank)) is not None
        }
        spikes = []
        for rank, own in times.items():
            others = [value for other, value in times.items() if other != rank]
            quiet = not others or median(others) <= QUIET
            if not own <= SPIKE and quiet:  # also what is not a number
                spikes.append(Spike(rank, own, median(others) if others else 1.0))
        for rank, mean in means.items():
            if mean < float("inf"):
                steps = self._usual.setdefault(rank, deque(maxlen=WINDOW_STEPS))
                steps.append(mean)
        return spikes

    def _usual_of(self, rank: int) -> float | None:
        steps = self._usual.get(rank, ())
        usual = median(steps) if len(steps) >= KNOWN_STEPS else 0.0
        return usual or None
