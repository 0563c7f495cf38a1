"""Detection of ranks with outlying gradients in a step; gradients are always noisy.

A rank's own gradient, before the reduction over ranks, is compared with its own last steps: ranks
differ in their number of samples, and runs in noise. All ranks jumping at once is training, not a
device. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW_STEPS = 32
# Steps before the usual norm is known.
LEAST_HISTORY_STEPS = 16
SPIKE_FACTOR = 10.0  # times the usual norm
QUIET_FACTOR = 3.0  # most of the other ranks' median


@dataclass(frozen=True)
class Spike:
    """Rank with its norm in multiples of the usual norm, and the median of the other ranks."""

    rank: int
    times: float
    others: float


class SpikeDetector:
    """Detection of spikes, step by step."""

    def __init__(self) -> None:
        self._usual: dict[int, deque[float]] = {}

    def after_step(self, norms: Sequence[float], counts: Sequence[float]) -> list[Spike]:
        """Return the spikes of a step.

        Args:
            norms: of each rank's part of the gradient of the mean loss of all ranks.
            counts: of the losses in each part; ranks without losses have no gradient.
        """
        total = sum(counts)
        shares = {rank: count / total for rank, count in enumerate(counts) if count}
        means = {rank: norms[rank] / share for rank, share in shares.items()}
        times = {
            rank: mean / usual
            for rank, mean in means.items()
            if (usual := self._get_usual_norm(rank)) is not None
        }
        spikes = []
        for rank, own in times.items():
            others = [value for other, value in times.items() if other != rank]
            quiet = not others or median(others) <= QUIET_FACTOR
            if not own <= SPIKE_FACTOR and quiet:  # also NaN
                spikes.append(Spike(rank, own, median(others) if others else 1.0))
        for rank, mean in means.items():
            if mean < float("inf"):
                steps = self._usual.setdefault(rank, deque(maxlen=WINDOW_STEPS))
                steps.append(mean)
        return spikes

    def _get_usual_norm(self, rank: int) -> float | None:
        steps = self._usual.get(rank, ())
        usual = median(steps) if len(steps) >= LEAST_HISTORY_STEPS else 0.0
        return usual or None
