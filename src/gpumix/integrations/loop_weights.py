"""What the loss of each rank's samples counts for in a loop that computes its losses itself.

A loop knows its own rank's samples only: its loss is a sum over items of these, divided by their
number, or by the number of all ranks' items. Either way the loss of the whole batch is the mean of
the ranks' losses, each weighted by what it was divided by, which its autograd graph tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpumix.engine.comm import Communicator
from gpumix.engine.loss_graph import denominators_of, is_sum
from gpumix.engine.reading import Reading
from gpumix.spec.errors import InputError

MOST_TERMS = 6
# Columns of what a rank tells: whether it has samples, its rows, the count that the loop gives,
# from TERMS on the denominators of its terms; last, a value that the loss is divided by, and
# whether it is a sum.
HAS, ROWS, GIVEN, TERMS, VALUE, SUM = 0, 1, 2, 3, -2, -1
COUNT = "accelerator.backward(loss, count=N), N the number of items that the loss is a mean over"


class Worth(NamedTuple):
    """What a rank's loss counts for in that of all ranks, float64 on the device.

    Attributes:
        weight: what it is multiplied with: 1 if losses are sums over samples.
        share: of all ranks' weights.
    """

    weight: Tensor
    share: Tensor


class LoopWeights:
    """The weight of this rank's loss, step by step."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_known = False  # that losses are computed in a way that is understood
        self._told: Reading | None = None  # of the step before

    def of(self, loss: Tensor, own: int, rows: int, count: Tensor | float | None) -> Worth:
        """What the loss counts for. Collective.

        Args:
            loss: of this rank's samples, with its graph.
            own: how many samples these are; 0 where the loss is of one that stands in.
            rows: samples that the loss was computed of.
            count: what the loop says that the loss is a mean over.

        Raises:
            InputError: the graph does not tell how the loss was reduced, and ranks have unlike
                numbers of samples; or the step before divided by 1.
        """
        self._refuse_ones()
        terms = () if count is not None else denominators_of(loss)[:MOST_TERMS]
        if self._is_known and count is None and not terms:
            raise InputError(
                "the loss is computed in another way than before",
                where="accelerator.backward",
                why="its autograd graph does not tell what it is a mean over",
                fix=COUNT,
            )
        device = self._comm.device
        row = torch.full((TERMS + MOST_TERMS + 2,), torch.nan, dtype=torch.float64, device=device)
        row[HAS].fill_(float(own > 0))
        row[ROWS].fill_(float(rows))
        row[SUM].fill_(float(count is None and is_sum(loss)))
        if values := () if count is not None else denominators_of(loss, shapes=False):
            row[VALUE].copy_(values[0])
        if count is not None:
            row[GIVEN].copy_(torch.as_tensor(count))
        for place, term in enumerate(terms, TERMS):
            row[place].copy_(term)
        table = self._comm.exchanged(row, "weights of losses")
        if self._is_known:
            self._told = Reading([table])
        column = TERMS
        if not self._is_known:
            column = _column(table.tolist())
            self._is_known = column == TERMS
        elif count is not None:
            column = GIVEN
        of_ranks = torch.where(table[:, HAS] > 0, table[:, column], 0.0)
        share = of_ranks[self._comm.rank] / of_ranks.sum()
        sums = table[:, SUM].all() & (own > 0)
        return Worth(torch.where(sums, torch.ones_like(share), share), share)

    def _refuse_ones(self) -> None:
        """
        Raises:
            InputError: in the step before, a rank's loss was divided by a number that is 1, and
                others by others.
        """
        if self._told is None:
            return
        [table] = self._told.tensors()
        own = {row[VALUE] for row in table.tolist() if row[HAS] and not math.isnan(row[VALUE])}
        self._told = None
        if 1.0 in own and len(own) > 1:
            raise InputError(
                "the loss of a rank was divided by 1, others by other numbers",
                where="accelerator.backward, one step before",
                why="whether there was one item to count, or none and the number is 1 at least, "
                "cannot be told, and the loss of the whole batch depends on it",
                fix=COUNT,
            )


def _column(table: Sequence[Sequence[float]]) -> int:
    """Which column of what ranks told has the weights: what the loop says, what the graph tells, or
    the rows where all ranks have as many."""
    known = [row for row in table if row[HAS]]
    if not any(math.isnan(row[GIVEN]) for row in known):
        return GIVEN
    alike = all(_are_alike(row[TERMS:VALUE], known[0][TERMS:VALUE]) for row in known)
    idle = len(known) < len(table)
    equal = all(math.isclose(row[TERMS], known[0][TERMS], rel_tol=1e-6) for row in known)
    if alike and not (idle and equal and len(known) > 1):
        return TERMS
    if not idle and len({row[ROWS] for row in known}) == 1:
        return ROWS
    if alike:
        raise InputError(
            "a rank has no samples, and the loss is divided by a number of all ranks",
            where="accelerator.backward",
            why="the number counts the sample that stands in on the rank without any",
            fix="use batches of at least as many samples as there are devices, or plan without "
            "the slowest device",
        )
    raise InputError(
        "nothing tells what the loop's loss is a mean over, and ranks have unlike numbers of "
        "samples",
        where="accelerator.backward",
        why="its autograd graph has operations after the mean or sum, or terms that are means over "
        "different things",
        fix=COUNT,
    )


def _are_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the denominators of all terms of two ranks' losses have the same ratio."""
    pairs = [(a, b) for a, b in zip(one, other) if not (math.isnan(a) and math.isnan(b))]
    ratios = [a / b if b else math.nan for a, b in pairs]
    return bool(pairs) and all(math.isclose(r, ratios[0], rel_tol=1e-6) for r in ratios)
