"""Parts of the global batch read by each rank: a plan's only decision about the data.

Pure and numpy-free. Parts are in rank order, or in the order of a plan's micro-batches if several
ranks read the same samples (pipeline stages or tensor-parallel groups). A part may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Integral

from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import BatchWorker, Plan
from gpumix.schema.plan.splitting import scale_offset, split_rows

Shares = Sequence[int] | Plan
"""Samples of each global batch per rank, in rank order; or a plan."""


@dataclass(frozen=True)
class BatchShare:
    """A rank's part of a global batch.

    Attributes:
        sizes: samples in each part of the batch, in order.
        own: numbers of the parts read by the rank.
    """

    sizes: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def total(self) -> int:
        """Samples of the global batch."""
        return self._offsets[-1]

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes))

    def rows(self, total: int | None = None) -> tuple[range, ...]:
        """Return the rank's rows of the batch. With `total`, a smaller batch is divided in the same
        proportions.

        No part gets more samples than in a full batch, so memory suffices.
        """
        whole = self.total
        rows = [self._offsets[n : n + 2] for n in self.own]
        if total is None or total >= whole:
            return tuple(range(*ends) for ends in rows)
        return tuple(range(*(scale_offset(total, end, whole) for end in ends)) for ends in rows)


def get_batch_workers(shares: Shares) -> tuple[BatchWorker, ...]:
    """Return the workers of the (first) stage with their parts of the batch, in order. For lists of
    samples and plans without a prediction, a worker's speed is its number of samples.

    Raises:
        InputError: a share is negative or not an integer, or all are zero.
    """
    if not isinstance(shares, Plan):
        return tuple(
            BatchWorker((n,), float(size)) for n, size in enumerate(_check_samples(shares))
        )
    return shares.batch_workers


def get_batch_share(shares: Shares, rank: int) -> BatchShare:
    """Return the part of `rank`.

    Raises:
        InputError: a share is negative or not an integer, all are zero, or `rank` has none.
    """
    if isinstance(shares, Plan):
        if not 0 <= rank < len(shares.workers):
            raise InputError(
                f"there is no rank {rank} in a plan for {len(shares.workers)}",
                code="rank-out-of-range",
            )
        return BatchShare(shares.sizes, shares.parts_read_by(rank))
    sizes = _check_samples(shares)
    if not 0 <= rank < len(sizes):
        raise InputError(
            f"there is no rank {rank} among {len(sizes)} shares of the batch",
            code="rank-out-of-range",
        )
    return BatchShare(sizes, (rank,))


def get_micro_batch_rows(plan: Plan, rank: int, samples: int) -> tuple[range, ...]:
    """Return the rows of each micro-batch of a rank, in order, in a batch of only `samples`
    samples. With several stages a micro-batch may be empty, because other stages rely on the count.
    For a full batch see `Plan.rows_of`.

    Raises:
        InputError: `samples` is zero, or more than the plan's global batch.
    """
    if not 0 < samples <= plan.global_batch:
        raise InputError(
            f"a step of {samples} samples, by a plan for {plan.global_batch}",
            code="global-batch-mismatch",
            fix=f"give it 1 to {plan.global_batch} samples, or plan for another global batch",
        )
    if samples == plan.global_batch:
        return plan.rows_of(rank)
    rows = get_batch_share(plan, rank).rows(samples)
    if len(plan.stages) > 1:
        return rows
    if plan.uses_tensor_parallel:
        return tuple(filter(None, rows))
    return split_rows(rows[0], plan.workers[rank].micro_batch)


def _check_samples(given: Sequence[int]) -> tuple[int, ...]:
    given = tuple(given)
    if any(not isinstance(s, Integral) or isinstance(s, bool) or s < 0 for s in given):
        raise InputError(
            f"the samples per rank must be integers of 0 or more, not {given}",
            code="shares-not-integers",
        )
    sizes = tuple(int(s) for s in given)
    if sum(sizes) == 0:
        raise InputError(f"the samples per rank add up to nothing: {sizes}", code="shares-empty")
    return sizes
