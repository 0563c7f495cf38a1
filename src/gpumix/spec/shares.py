"""Which part of each global batch a rank reads: the only thing a plan decides about the data.

Pure and numpy-free. Parts lie in a batch in rank order, or as the micro-batches of a plan do
whose ranks read the same ones: those of several stages, or of a team. A part may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Integral

from gpumix.spec.cut import cut_rows, scaled
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan, Taker

Shares = Sequence[int] | Plan
"""Samples of each global batch per rank, in rank order; or the plan that says so."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch.

    Attributes:
        sizes: into which parts the batch is cut, in order.
        own: numbers of those that the rank reads.
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
        """The rank's rows of the batch; of one of only `total` samples, if that is given, which is
        cut in the same proportions.

        No part gets more than in a full batch, so what fits in memory there fits here.
        """
        whole = self.total
        rows = [self._offsets[n : n + 2] for n in self.own]
        if total is None or total >= whole:
            return tuple(range(*ends) for ends in rows)
        return tuple(range(*(scaled(total, end, whole) for end in ends)) for ends in rows)


def workers_of(shares: Shares) -> tuple[Taker, ...]:
    """Who takes the parts of the batch, in their order; of a plan of several stages in the first
    one. By lists of samples, and by plans without a prediction, a worker is as fast as it has
    samples.

    Raises:
        InputError: a share is negative or no integer, or all are zero.
    """
    if not isinstance(shares, Plan):
        return tuple(Taker((n,), float(size)) for n, size in enumerate(_checked(shares)))
    return shares.takers


def share_of(shares: Shares, rank: int) -> Share:
    """The part of `rank`.

    Raises:
        InputError: a share is negative or no integer, all are zero, or `rank` has none.
    """
    if isinstance(shares, Plan):
        if not 0 <= rank < len(shares.workers):
            raise InputError(f"there is no rank {rank} in a plan for {len(shares.workers)}")
        return Share(shares.sizes, shares.parts_read_by(rank))
    sizes = _checked(shares)
    if not 0 <= rank < len(sizes):
        raise InputError(f"there is no rank {rank} among {len(sizes)} shares of the batch")
    return Share(sizes, (rank,))


def rows_of(plan: Plan, rank: int, samples: int) -> tuple[range, ...]:
    """Which samples of a global batch of only `samples` a rank computes: those of each of its
    micro-batches, in order; in several stages some may have none, for others count on them. Of a
    whole batch see `Plan.rows_of`.

    Raises:
        InputError: there are none, or more than the plan has.
    """
    if not 0 < samples <= plan.global_batch:
        raise InputError(
            f"a step of {samples} samples, by a plan for {plan.global_batch}",
            fix=f"give it 1 to {plan.global_batch} samples, or plan for another global batch",
        )
    if samples == plan.global_batch:
        return plan.rows_of(rank)
    rows = share_of(plan, rank).rows(samples)
    if len(plan.stages) > 1:
        return rows
    if plan.in_teams:
        return tuple(filter(None, rows))
    return cut_rows(rows[0], plan.workers[rank].micro_batch)


def _checked(given: Sequence[int]) -> tuple[int, ...]:
    given = tuple(given)
    if any(not isinstance(s, Integral) or isinstance(s, bool) or s < 0 for s in given):
        raise InputError(f"the samples per rank must be integers of 0 or more, not {given}")
    sizes = tuple(int(s) for s in given)
    if sum(sizes) == 0:
        raise InputError(f"the samples per rank add up to nothing: {sizes}")
    return sizes
