"""Packing of documents by first-fit within windows, all windows at once. Numpy only.

Documents come in a keyed order. Each window is packed separately, longest document first, each into
the first pack with room. So packs depend on the lengths and the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpumix.data.order.global_order import GlobalOrder
from gpumix.schema.errors import InputError

WINDOW_DOCUMENTS = 4096
"""Documents per window: with usual text lengths, less than 0.2 % of the packs stays empty."""

_WINDOWS_AT_ONCE = 256  # windows whose packs are tracked at once


@dataclass(frozen=True)
class PackAssignment:
    """Documents by pack: pack k has `documents[begins[k]:begins[k + 1]]`, in order."""

    documents: np.ndarray
    begins: np.ndarray

    def __len__(self) -> int:
        return len(self.begins) - 1

    def of(self, pack: int) -> np.ndarray:
        """Return the numbers of the documents in a pack."""
        return self.documents[self.begins[pack] : self.begins[pack + 1]]


def pack_first_fit(
    lengths: np.ndarray, capacity: int, *, seed: int, window: int = WINDOW_DOCUMENTS
) -> PackAssignment:
    """Assign all documents to packs of at most `capacity` tokens.

    Args:
        lengths: tokens of each document, 1 to `capacity`.
        seed: seed of the order in which documents reach the windows.
        window: documents packed together.

    Raises:
        InputError: there is no document, or a length is out of range.
    """
    if not len(lengths):
        raise InputError("there are no documents to pack", code="no-documents-to-pack")
    if not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise InputError(
            f"documents of {lengths.min()} to {lengths.max()} tokens do not go into packs of "
            f"{capacity}",
            code="document-length-out-of-range",
        )
    order = GlobalOrder(len(lengths), seed).span(0, len(lengths))
    step = window * _WINDOWS_AT_ONCE
    documents, counts = [], []
    for first in range(0, len(order), step):
        part = order[first : first + step]
        packs = _assign_packs(lengths[part].astype(np.int32), capacity, window)
        # Packs in the order of windows, documents of a pack in order of arrival.
        documents.append(part[np.argsort(packs, kind="stable")])
        used = np.bincount(packs)
        counts.append(used[used > 0])
    return PackAssignment(np.concatenate(documents), np.cumsum(np.concatenate([[0], *counts])))


def _assign_packs(lengths: np.ndarray, capacity: int, window: int) -> np.ndarray:
    """Return the pack number of each document, window after window; some numbers are unused."""
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
        # Packs after the used ones are empty, so some pack always has room.
        packs[:, place] = first = (free[:, : used + 1] >= need[:, None]).argmax(axis=1)
        free[rows, first] -= need
        used = max(used, int(first.max()) + 1)
    placed = np.empty_like(packs)
    np.put_along_axis(placed, longest_first, packs, axis=1)
    placed += rows[:, None] * used
    return placed.reshape(-1)[: len(lengths)]
