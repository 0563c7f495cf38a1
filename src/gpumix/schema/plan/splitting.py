"""Splitting of batches into micro-batches, and of flat buffers into shards. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


def split_micro_batches(samples: int, micro_batch: int) -> tuple[int, ...]:
    """Split `samples` into micro-batches of `micro_batch`; the last may be smaller."""
    if samples == 0:
        return ()
    full, rest = divmod(samples, micro_batch)
    return (micro_batch,) * full + ((rest,) if rest else ())


def split_rows(rows: range, micro_batch: int) -> tuple[range, ...]:
    """Return the rows of each micro-batch, or an empty tuple for no rows."""
    sizes = split_micro_batches(len(rows), max(1, micro_batch))
    begins = accumulate(sizes, initial=rows.start)
    return tuple(range(begin, begin + size) for begin, size in zip(begins, sizes))


def compute_shard_offsets(numel: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return each worker's start in a flat buffer, and the end: len(shares) + 1 offsets.

    Worker r owns [offsets[r], offsets[r + 1]). Rounding follows the running sum of the shares, so a
    worker is never more than one element off its share; a share of zero owns nothing.
    """
    total, running, offsets = sum(shares), 0.0, [0]
    for share in shares:
        running += share
        offsets.append(max(offsets[-1], scale_offset(numel, running, total)))
    offsets[-1] = numel
    last_owner = max((r for r, share in enumerate(shares) if share > 0), default=len(shares) - 1)
    for r in range(last_owner + 1, len(shares)):
        offsets[r] = numel
    return tuple(offsets)


def cut_parameters(
    numels: Sequence[int], shares: tuple[float, ...], multiple: int = 1
) -> tuple[int, ...]:
    """Return each worker's start in a flat buffer of parameters, and the end; see
    `compute_shard_offsets`.

    Args:
        numels: of the parameters, in order.
        multiple: cuts are moved to the nearest multiple of so many elements in the parameter that
            they go through, or to its end.
    """
    ends = list(accumulate(numels))
    offsets = compute_shard_offsets(ends[-1] if ends else 0, shares)
    if multiple == 1 or not ends:
        return offsets
    return tuple(_align_offset(offset, ends, multiple) for offset in offsets)


def _align_offset(offset: int, ends: Sequence[int], multiple: int) -> int:
    """Move an offset to the nearest multiple inside of its parameter, or to the end of it."""
    place = bisect_left(ends, offset)  # of the parameter that contains the offset, or ends there
    begin = ends[place - 1] if place else 0
    if offset in (begin, ends[place]):
        return offset
    below = offset - (offset - begin) % multiple
    above = min(below + multiple, ends[place])
    return below if offset - below <= above - offset else above


def scale_offset(numel: int, begin: float, total: float) -> int:
    """Map position `begin` of `total` to the nearest element index of a buffer of `numel`."""
    return min(numel, round(numel * (begin / total)))


@dataclass(frozen=True)
class ShardIntervals:
    """The intervals of a flat buffer owned by ranks, in rank order.

    Attributes:
        offsets: the start of each interval, and the end of the last: ranks + 1 numbers.
    """

    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the buffer."""
        return self.offsets[-1]

    def of(self, rank: int) -> tuple[int, int]:
        """Return the start and end of a rank's interval."""
        return self.offsets[rank], self.offsets[rank + 1]

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each interval; a list for PyTorch, not to be modified."""
        return [end - begin for begin, end in pairwise(self.offsets)]

    @cached_property
    def longest(self) -> int:
        """Number of elements of the longest interval."""
        return max(self.sizes)

    @cached_property
    def equal(self) -> bool:
        """True if all intervals have equal length."""
        return min(self.sizes) == self.longest


def compute_shard_sizes(numel: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of elements of a flat buffer owned by each worker; the sum is `numel`."""
    if numel == 0:
        return (0,) * len(shares)
    return tuple(b - a for a, b in pairwise(compute_shard_offsets(numel, shares)))
