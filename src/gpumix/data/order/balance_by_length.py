"""Assignment of a batch's samples to workers when lengths differ. Numpy only.

Each worker gets as many samples as the plan says, so memory stays as planned; cost and speed of the
worker decide which samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def compute_costs(lengths: np.ndarray, attention: float) -> np.ndarray:
    """Return relative costs of samples: a token costs 1, a pair of tokens `attention`."""
    lengths = lengths.astype(np.float64)
    costs: np.ndarray = lengths * (1.0 + attention * lengths)
    return costs


def assign_samples(
    costs: np.ndarray, counts: Sequence[int], speeds: Sequence[float]
) -> list[np.ndarray]:
    """Return each worker's places in `costs`, most expensive first, as many as in `counts`.

    The most expensive sample is assigned first, to the worker that would finish it earliest among
    workers with places left.
    """
    places = np.array(counts)
    loads = np.zeros(len(counts))
    pace = 1.0 / np.maximum(speeds, 1e-12)  # a worker of speed 0 has no places
    taken: list[list[int]] = [[] for _ in counts]
    for place in np.argsort(-costs, kind="stable").tolist():
        worker = int(np.where(places > 0, (loads + costs[place]) * pace, np.inf).argmin())
        loads[worker] += costs[place]
        places[worker] -= 1
        taken[worker].append(place)
    return [np.array(own, dtype=np.int64) for own in taken]
