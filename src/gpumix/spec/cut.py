"""How batches are cut into micro-batches, and flat buffers into shards. Pure."""

from __future__ import annotations

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
        offsets.append(max(offsets[-1], min(numel, round(numel * (running / total)))))
    offsets[-1] = numel
    last_owner = max((r for r, share in enumerate(shares) if share > 0), default=len(shares) - 1)
    for r in range(last_owner + 1, len(shares)):
        offsets[r] = numel
    return tuple(offsets)


def cut_sizes(numel: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Elements of a flat buffer that each worker owns; they add up to `numel`."""
    if numel == 0:
        return (0,) * len(shares)
    return tuple(b - a for a, b in pairwise(cut(numel, shares)))
