"""How batches are cut into micro-batches, and flat buffers into shards. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


def split_micro_batches(samples: int, micro_batch: int) -> tuple[int, ...]:
    """`samples` cut into micro-batches of `micro_batch`, the last one smaller if need be."""
    if samples == 0:
        return ()
    full, rest = divmod(samples, micro_batch)
    return (micro_batch,) * full + ((rest,) if rest else ())


def cut_rows(rows: range, micro_batch: int) -> tuple[range, ...]:
    """The rows of each micro-batch; none for no rows."""
    sizes = split_micro_batches(len(rows), max(1, micro_batch))
    begins = accumulate(sizes, initial=rows.start)
    return tuple(range(begin, begin + size) for begin, size in zip(begins, sizes))


def cut(numel: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Where each worker's interval of a flat buffer starts, and the end: len(shares) + 1 offsets.

    Worker r owns [offsets[r], offsets[r + 1]). Rounding follows the running sum of the shares, so a
    worker is never more than one element off its share; a share of zero owns nothing.
    """
    total, running, offsets = sum(shares), 0.0, [0]
    for share in shares:
        running += share
        offsets.append(max(offsets[-1], scaled(numel, running, total)))
    offsets[-1] = numel
    last_owner = max((r for r, share in enumerate(shares) if share > 0), default=len(shares) - 1)
    for r in range(last_owner + 1, len(shares)):
        offsets[r] = numel
    return tuple(offsets)


def scaled(numel: int, begin: float, total: float) -> int:
    """Where `begin` of a whole of `total` lies in one of `numel`, rounded."""
    return min(numel, round(numel * (begin / total)))


@dataclass(frozen=True)
class Intervals:
    """The intervals of a flat buffer that ranks own, in their order.

    Attributes:
        offsets: where each interval begins, and the end of the last one: ranks + 1 numbers.
    """

    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.offsets[-1]

    def of(self, rank: int) -> tuple[int, int]:
        """The begin and the end of a rank's interval."""
        return self.offsets[rank], self.offsets[rank + 1]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each interval; a list, which PyTorch takes, and which nobody may change."""
        return [end - begin for begin, end in pairwise(self.offsets)]

    @cached_property
    def longest(self) -> int:
        """Elements of the longest interval."""
        return max(self.sizes)

    @cached_property
    def equal(self) -> bool:
        """Whether all intervals are equally long."""
        return min(self.sizes) == self.longest


def cut_sizes(numel: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Elements of a flat buffer that each worker owns; they add up to `numel`."""
    if numel == 0:
        return (0,) * len(shares)
    return tuple(b - a for a, b in pairwise(cut(numel, shares)))
