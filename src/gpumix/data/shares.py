"""Which part of each global batch a rank reads: the only thing a plan decides about the data.

Pure and numpy-free. Ranks lie in a batch in rank order; a share may be zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from gpumix.spec.errors import InputError
from gpumix.spec.plan import cut


def check_shares(worker_samples: Sequence[int], rank: int) -> tuple[int, ...]:
    """`worker_samples` as a tuple.

    Raises:
        InputError: a share is negative or no integer, all are zero, or `rank` has none.
    """
    given = tuple(worker_samples)
    if any(not isinstance(s, Integral) or isinstance(s, bool) or s < 0 for s in given):
        raise InputError(f"the samples per rank must be integers of 0 or more, not {given}")
    shares = tuple(int(s) for s in given)
    if sum(shares) == 0:
        raise InputError(f"the samples per rank add up to nothing: {shares}")
    if not 0 <= rank < len(shares):
        raise InputError(f"there is no rank {rank} among {len(shares)} shares of the batch")
    return shares


def share(worker_samples: Sequence[int], rank: int) -> tuple[int, int]:
    """[start, stop) of `rank` inside a global batch of sum(worker_samples)."""
    start = sum(worker_samples[:rank])
    return start, start + worker_samples[rank]


def short_share(worker_samples: Sequence[int], rank: int, total: int) -> tuple[int, int]:
    """[start, stop) of `rank` inside a batch of only `total` samples, cut in the same proportions.

    No rank gets more than its share of a full batch, so what fits in memory there fits here.
    """
    offsets = cut(total, tuple(float(s) for s in worker_samples))
    return offsets[rank], offsets[rank + 1]
