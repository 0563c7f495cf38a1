"""Who takes which samples of a batch, when they differ in length. Numpy only.

Each worker gets as many as the plan says, so memory stays as planned; which ones go by what they
cost and by how fast it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def costs_of(lengths: np.ndarray, attention: float) -> np.ndarray:
    """What samples cost, relative to each other: a token is 1, a pair of tokens `attention`."""
    lengths = lengths.astype(np.float64)
    costs: np.ndarray = lengths * (1.0 + attention * lengths)
    return costs


def deal(costs: np.ndarray, counts: Sequence[int], speeds: Sequence[float]) -> list[np.ndarray]:
    """Of each worker the places in `costs` that it takes, dearest first, as many as `counts` says.

    The dearest goes first, to the worker that would be through with it earliest, of those that have
    places left.
    """
    places = np.array(counts)
    loads = np.zeros(len(counts))
    pace = 1.0 / np.maximum(speeds, 1e-12)  # who has none has no places either
    taken: list[list[int]] = [[] for _ in counts]
    for place in np.argsort(-costs, kind="stable").tolist():
        worker = int(np.where(places > 0, (loads + costs[place]) * pace, np.inf).argmin())
        loads[worker] += costs[place]
        places[worker] -= 1
        taken[worker].append(place)
    return [np.array(own, dtype=np.int64) for own in taken]
