"""Bucketed order: samples of similar length share a global batch. Numpy only.

The global order is sorted within windows. A window is a run of consecutive batches, whose samples
are sorted by length and cut into batches again; these come in a shuffled order. So an epoch still
has each sample once, and the order depends on seed, epoch, lengths and global batch size, never on
the plan.
"""

from __future__ import annotations

import numpy as np

from gpumix.data.order.global_order import GlobalOrder

WINDOW_BATCHES = 64
"""Batches per window: more makes batches more uniform, and the order less random."""


class BucketedOrder:
    """`base`, reordered so samples of similar length share a batch of `global_batch`.

    A batch that spans two epochs keeps the order of `base`.
    """

    def __init__(
        self,
        base: GlobalOrder,
        lengths: np.ndarray,
        global_batch: int,
        *,
        window_batches: int = WINDOW_BATCHES,
    ) -> None:
        self._base = base
        self._lengths = lengths
        self._size = global_batch
        self._window = window_batches
        self._kept: tuple[int, np.ndarray] = (-1, np.empty(0))  # last window: first batch, items

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return the items at positions [start, stop) of the endless sequence of epochs: int64."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            batch, first = divmod(start, self._size)
            last = min(self._size, first + stop - start)
            parts.append(self._batch(batch)[first:last])
            start += last - first
        return np.concatenate(parts)

    def _batch(self, batch: int) -> np.ndarray:
        """Return the items of a global batch, numbered across epochs."""
        begin, n = batch * self._size, self._base.n
        epoch = begin // n
        # Batches entirely within this epoch.
        first, end = -(-epoch * n // self._size), (epoch + 1) * n // self._size
        if not first <= batch < end:
            return self._base.span(begin, begin + self._size)
        opening = first + (batch - first) // self._window * self._window
        if self._kept[0] != opening:
            closing = min(end, opening + self._window)
            self._kept = opening, self._sort_window(opening, closing)
        found: np.ndarray = self._kept[1][batch - opening]
        return found

    def _sort_window(self, opening: int, closing: int) -> np.ndarray:
        """Return the items of batches [opening, closing), one row per batch."""
        items = self._base.span(opening * self._size, closing * self._size)
        by_length = items[np.argsort(self._lengths[items], kind="stable")]
        batches = by_length.reshape(closing - opening, self._size)
        # The seed differs from that of the samples, and each window has its own shuffle.
        shuffle = GlobalOrder(len(batches), ~self._base.seed)
        return batches[shuffle.indices(opening, np.arange(len(batches)))]
