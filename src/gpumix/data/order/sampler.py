"""Sampler of a rank: the global order, and the rank's part of each batch.

Samples of different lengths are dealt out by cost: every plan has the same set of samples in a
batch, and decides only which rank takes which. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpumix.data.core.source import Source, hash_parts
from gpumix.data.order.balance_by_length import assign_samples, compute_costs
from gpumix.data.order.global_order import Cursor, GlobalOrder
from gpumix.data.order.length_buckets import WINDOW_BATCHES, BucketedOrder
from gpumix.schema.errors import InputError
from gpumix.schema.plan.batch_shares import Shares, get_batch_share, get_batch_workers

NO_INDICES = np.empty(0, dtype=np.int64)
_SUMMED_SAMPLES = 2**16  # samples whose tokens are summed at once


@dataclass(frozen=True)
class BatchPart:
    """A rank's part of a global batch, in micro-batch order: positions in the global order, counted
    over all epochs, and dataset indices of the samples."""

    positions: np.ndarray
    indices: np.ndarray


class SequentialOrder:
    """The order of the dataset itself."""

    def span(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True)
class ByLength:
    """Settings for samples of different lengths.

    Attributes:
        bucketing: whether samples of similar length share a global batch.
        attention: cost of a pair of tokens, where a token costs 1: 1 / (6 width) for a transformer
            whose MLP is four times as wide.
        window_batches: number of batches sorted together with `bucketing`.
    """

    bucketing: bool = False
    attention: float = 0.0
    window_batches: int = WINDOW_BATCHES


DEFAULT_BY_LENGTH = ByLength()


class RankSampler:
    """The sampler of one rank.

    Args:
        cursor: cursor of the dataset, at any position.
        shares: samples of each global batch per rank, or a plan.
        rank: the rank that reads.
        lengths: tokens of each sample; None if all are equal, or unknown.
        in_order: whether the dataset has an order of its own.

    Raises:
        InputError: the shares are invalid; or bucketing is requested without known lengths.
    """

    def __init__(
        self,
        cursor: Cursor,
        shares: Shares,
        rank: int,
        *,
        lengths: np.ndarray | None = None,
        by_length: ByLength = DEFAULT_BY_LENGTH,
        in_order: bool = False,
    ) -> None:
        self._share = get_batch_share(shares, rank)
        self._workers = get_batch_workers(shares)
        self._lengths = lengths
        self._attention = by_length.attention
        self._order: GlobalOrder | BucketedOrder | SequentialOrder = cursor.order
        if in_order:
            self._order = SequentialOrder()
        if by_length.bucketing:
            if lengths is None:
                raise InputError(
                    "bucketing needs to know how long samples are, and the dataset does not say",
                    code="sample-lengths-unknown",
                    fix="give it a column `length`, or an attribute `lengths` with one integer a "
                    "sample; leave bucketing out where all are alike",
                )
            self._order = BucketedOrder(
                cursor.order,
                lengths,
                self.global_batch,
                window_batches=by_length.window_batches,
            )

    @property
    def global_batch(self) -> int:
        return self._share.total

    def part(self, position: int) -> BatchPart:
        """Return the rank's part of the global batch beginning at `position`."""
        if self._lengths is None:
            rows = [np.arange(r.start, r.stop) for r in self._share.rows()]
            spans = [
                self._order.span(position + r[0], position + r[-1] + 1) for r in rows if len(r)
            ]
            return BatchPart(
                position + np.concatenate([NO_INDICES, *rows]),
                np.concatenate([NO_INDICES, *spans]),
            )
        batch = self._order.span(position, position + self.global_batch)
        parts = self._dealt(self._lengths[batch])
        own = np.concatenate([NO_INDICES, *(parts[n] for n in self._share.own)])
        return BatchPart(position + own, batch[own])

    def indices(self, position: int) -> np.ndarray:
        """Return the dataset indices of the part at `position`."""
        return self.part(position).indices

    def tokens(self, start: int, stop: int) -> int | None:
        """Return the tokens of samples [start, stop) in the order, over all ranks and without
        padding; None if lengths are equal or unknown."""
        if self._lengths is None:
            return None
        samples = len(self._lengths)
        first, end = -(-start // samples), stop // samples  # whole epochs
        if first >= end:
            return self._tokens_of(self._lengths, start, stop)
        of_epochs = (end - first) * int(self._lengths.sum(dtype=np.int64))
        before = self._tokens_of(self._lengths, start, first * samples)
        return before + of_epochs + self._tokens_of(self._lengths, end * samples, stop)

    def _tokens_of(self, lengths: np.ndarray, start: int, stop: int) -> int:
        parts = (
            lengths[self._order.span(first, min(first + _SUMMED_SAMPLES, stop))]
            for first in range(start, stop, _SUMMED_SAMPLES)
        )
        return sum(int(part.sum(dtype=np.int64)) for part in parts)

    def _dealt(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Return the places of each part in a batch, given the lengths of its samples. A worker's
        samples come longest first, so a micro-batch has similar lengths."""
        sizes = self._share.sizes
        counts = [sum(sizes[part] for part in worker.parts) for worker in self._workers]
        speeds = [worker.speed for worker in self._workers]
        taken = assign_samples(compute_costs(lengths, self._attention), counts, speeds)
        parts = [NO_INDICES] * len(sizes)
        for worker, own in zip(self._workers, taken, strict=True):
            ends = np.cumsum([sizes[part] for part in worker.parts])
            for part, places in zip(worker.parts, np.split(own, ends[:-1]), strict=True):
                parts[part] = places
        return parts


def make_start_cursor(source: Source, seed: int, by_length: ByLength, batch: int) -> Cursor:
    """Return the cursor at a dataset's first sample. In a bucketed order a position means another
    sample for each global batch size, so the fingerprint includes the size."""
    mark = source.fingerprint
    if by_length.bucketing:
        mark = hash_parts(mark, "bucketed", by_length.window_batches, batch)
    return Cursor(seed, len(source), mark)
