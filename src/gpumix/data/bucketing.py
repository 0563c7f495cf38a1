"""An order in which samples of like length meet in one global batch. Numpy only.

It is the global order, sorted inside of windows: each window is some batches in a row, whose
samples are sorted by length and cut into batches anew, which then come in a shuffled order. So an
epoch still holds each sample once, and the order depends on seed, epoch, lengths and the size of
the global batch, never on the plan.
"""

from __future__ import annotations

import numpy as np

from gpumix.data.order import GlobalOrder

WINDOW_BATCHES = 64
"""Batches of a window: more make batches more even inside, and less random."""


class BucketedOrder:
    """`base`, with samples of like length in each batch of `global_batch`.

    A batch with samples of two epochs stays as it is, and so does what lies in an epoch beside
    whole batches.
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
        self._kept: tuple[int, np.ndarray] = (-1, np.empty(0))  # the window that was asked for last

    def span(self, start: int, stop: int) -> np.ndarray:
        """The items at positions [start, stop) of the endless sequence of epochs: int64."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            batch, first = divmod(start, self._size)
            last = min(self._size, first + stop - start)
            parts.append(self._batch(batch)[first:last])
            start += last - first
        return np.concatenate(parts)

    def _batch(self, batch: int) -> np.ndarray:
        """The items of a global batch, counted over all epochs."""
        begin, n = batch * self._size, self._base.n
        epoch = begin // n
        # Batches that lie in this epoch as a whole.
        first, end = -(-epoch * n // self._size), (epoch + 1) * n // self._size
        if not first <= batch < end:
            return self._base.span(begin, begin + self._size)
        opening = first + (batch - first) // self._window * self._window
        if self._kept[0] != opening:
            closing = min(end, opening + self._window)
            self._kept = opening, self._sorted(opening, closing)
        found: np.ndarray = self._kept[1][batch - opening]
        return found

    def _sorted(self, opening: int, closing: int) -> np.ndarray:
        """The items of the batches [opening, closing), one row each."""
        items = self._base.span(opening * self._size, closing * self._size)
        by_length = items[np.argsort(self._lengths[items], kind="stable")]
        batches = by_length.reshape(closing - opening, self._size)
        # Another seed than that of the samples, and another shuffle for each window.
        shuffle = GlobalOrder(len(batches), ~self._base.seed)
        return batches[shuffle.indices(opening, np.arange(len(batches)))]
