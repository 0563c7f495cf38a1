"""Which documents go into which pack: first-fit inside windows, all windows at once. Numpy only.

Documents come in a keyed order; each window of them is packed for itself, longest first, every
document into the first pack that has room. So the packs depend on the lengths and the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpumix.data.order import GlobalOrder
from gpumix.spec.errors import InputError

WINDOW = 4096
"""Documents of a window: below 0.2 % of the packs stay empty, of texts of usual lengths."""

_WINDOWS_AT_ONCE = 256  # of whose packs the free rooms lie in memory


@dataclass(frozen=True)
class Packs:
    """Documents by pack: pack k holds `documents[begins[k]:begins[k + 1]]`, in that order."""

    documents: np.ndarray
    begins: np.ndarray

    def __len__(self) -> int:
        return len(self.begins) - 1

    def of(self, pack: int) -> np.ndarray:
        """Numbers of the documents in a pack."""
        return self.documents[self.begins[pack] : self.begins[pack + 1]]


def first_fit(lengths: np.ndarray, capacity: int, *, seed: int, window: int = WINDOW) -> Packs:
    """All documents in packs of at most `capacity` tokens.

    Args:
        lengths: tokens of each document, 1 to `capacity`.
        seed: of the order in which documents come to the windows.
        window: documents that are packed together.

    Raises:
        InputError: there is no document, or one is longer than a pack.
    """
    if not len(lengths):
        raise InputError("there are no documents to pack")
    if not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise InputError(
            f"documents of {lengths.min()} to {lengths.max()} tokens do not go into packs of "
            f"{capacity}"
        )
    order = GlobalOrder(len(lengths), seed).span(0, len(lengths))
    step = window * _WINDOWS_AT_ONCE
    documents, counts = [], []
    for first in range(0, len(order), step):
        part = order[first : first + step]
        packs = _pack(lengths[part].astype(np.int32), capacity, window)
        # Packs in the order of their windows, of each pack the documents in the order they came.
        documents.append(part[np.argsort(packs, kind="stable")])
        used = np.bincount(packs)
        counts.append(used[used > 0])
    return Packs(np.concatenate(documents), np.cumsum(np.concatenate([[0], *counts])))


def _pack(lengths: np.ndarray, capacity: int, window: int) -> np.ndarray:
    """The number of each document's pack, windows one after the other; some numbers are unused."""
    windows = -(-len(lengths) // window)
    width = min(window, len(lengths))
    table = np.zeros((windows, width), dtype=np.int32)
    table.reshape(-1)[: len(lengths)] = lengths
    longest_first = np.argsort(-table, axis=1, kind="stable")
    table = np.take_along_axis(table, longest_first, axis=1)
    rows, used = np.arange(windows), 0
    free = np.full((windows, 16), capacity, dtype=np.int32)
    packs = np.empty((windows, width), dtype=np.int64)
    for place, need in enumerate(table.T):
        if used == free.shape[1]:
            free = np.concatenate([free, np.full_like(free, capacity)], axis=1)
        # All packs behind those that are used are empty, so there is always one with room.
        packs[:, place] = first = (free[:, : used + 1] >= need[:, None]).argmax(axis=1)
        free[rows, first] -= need
        used = max(used, int(first.max()) + 1)
    placed = np.empty_like(packs)
    np.put_along_axis(placed, longest_first, packs, axis=1)
    placed += rows[:, None] * used
    return placed.reshape(-1)[: len(lengths)]
