"""Weights of the ranks' losses in a loop computing losses from outputs.

A loop sees only samples of its rank: its loss is a sum over items of these samples, divided by the
number of items on the rank or on all ranks. Either way the loss of the global batch is the mean of
the ranks' losses, weighted by their denominators, found in the autograd graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpumix.engine.comm.async_read import AsyncRead
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.loss.loss_graph import divided_by_program, find_denominators, is_sum
from gpumix.schema.errors import InputError

MOST_TERMS = 6
# Columns of a rank's row: having samples, its rows, the count given by the loop, from TERMS on the
# denominators of its terms; last, a value dividing the loss, and whether the loss is a sum.
HAS_SAMPLES, ROWS, GIVEN_COUNT, TERMS, VALUE, SUM = 0, 1, 2, 3, -2, -1
FIX_GIVE_COUNT = (
    "accelerator.backward(loss, count=N), N the number of items that the loss is a mean over"
)


class LossWeight(NamedTuple):
    """Weight of a rank's loss among the losses of all ranks, float64 on the device.

    Attributes:
        weight: the factor of the loss: 1 if losses are sums over samples.
        share: of the weights of all ranks.
    """

    weight: Tensor
    share: Tensor


class LossFactors:
    """Check on the factors by which ranks multiply the model's own loss, which is of all ranks'
    samples: its gradients are right if the factors are equal.

    The first factors are read at once; later factors one step later, for the host not to wait.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_checked = False  # a first factor
        self._told: AsyncRead | None = None  # from the step before

    def of(self, factor: Tensor, own: int) -> Tensor:
        """Return the factor of the ranks with samples, on the device. Collective.

        Args:
            factor: of this rank, one element.
            own: the number of this rank's samples; 0 if the factor is of a stand-in sample.

        Raises:
            InputError: ranks multiplied by unlike numbers, now at the first call, else one before.
        """
        self._check()
        row = torch.stack([torch.full_like(factor, float(own > 0)), factor]).double().flatten()
        table = self._comm.exchanged(row.to(self._comm.device), "factors of losses")
        self._told = AsyncRead([table])
        if not self._is_checked:
            self._check()
            self._is_checked = True
        first = table[:, 0].argmax(0, keepdim=True)
        return table[:, 1].gather(0, first).squeeze(0)

    def _check(self) -> None:
        """Raise InputError if ranks multiplied by unlike numbers, for the factors exchanged
        last."""
        if self._told is None:
            return
        [table] = self._told.tensors()
        self._told = None
        factors = [value for has_samples, value in table.tolist() if has_samples]
        if all(math.isclose(value, factors[0], rel_tol=1e-5) for value in factors):
            return
        if any(map(math.isnan, factors)):  # a loss that is no number is so on all ranks
            return
        raise InputError(
            "processes multiply the model's loss by unlike numbers: "
            + ", ".join(f"{value:g}" for value in factors),
            code="loss-factors-unequal",
            where="accelerator.backward" + (", one call before" if self._is_checked else ""),
            why="the loss that the model returned is of the samples of all processes already",
            fix="multiply it by one number for all processes, such as accelerator.reduce(n, "
            "'sum') of the own numbers; or call the model without labels, and compute the loss "
            "from its outputs",
        )


class LossWeigher:
    """Weights of this rank's losses, step by step."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_known = False  # the graph shows how losses are reduced
        self._told: AsyncRead | None = None  # from the step before

    def of(self, loss: Tensor, own: int, rows: int, count: Tensor | float | None) -> LossWeight:
        """Return the worth of the loss. Collective.

        Args:
            loss: of this rank's samples, with its graph.
            own: the number of this rank's samples; 0 if the loss is of a stand-in sample.
            rows: samples that the loss was computed from.
            count: the number of items in the mean, if the loop gives it.

        Raises:
            InputError: the graph does not show the reduction and ranks have unlike numbers of
                samples, the step before divided by 1, or `count` is not that of all terms.
        """
        self._check_denominators()
        terms = find_denominators(loss)[:MOST_TERMS]
        if self._is_known and count is None and not terms:
            raise InputError(
                "the loss is computed in another way than before",
                code="loss-changed-in-loop",
                where="accelerator.backward",
                why="its autograd graph does not tell what it is a mean over",
                fix=FIX_GIVE_COUNT,
            )
        device = self._comm.device
        row = torch.full((TERMS + MOST_TERMS + 2,), torch.nan, dtype=torch.float64, device=device)
        row[HAS_SAMPLES].fill_(float(own > 0))
        row[ROWS].fill_(float(rows))
        row[SUM].fill_(float(count is None and is_sum(loss)))
        value = None if count is not None else divided_by_program(loss)
        if value is not None:
            row[VALUE].copy_(value)
        if count is not None:
            row[GIVEN_COUNT].copy_(torch.as_tensor(count))
        for place, term in enumerate(terms, TERMS):
            row[place].copy_(term)
        table = self._comm.exchanged(row, "weights of losses")
        if self._is_known:
            self._told = AsyncRead([table])
        column = TERMS
        if not self._is_known:
            column = _choose_column(table.tolist())
            self._is_known = column == TERMS
        elif count is not None:
            column = GIVEN_COUNT
        of_ranks = torch.where(table[:, HAS_SAMPLES] > 0, table[:, column], 0.0)
        share = of_ranks[self._comm.rank] / of_ranks.sum()
        sums = table[:, SUM].all() & (own > 0)
        return LossWeight(torch.where(sums, torch.ones_like(share), share), share)

    def _check_denominators(self) -> None:
        """Raise InputError if a rank divided its loss by 1 in the step before, and another did
        not."""
        if self._told is None:
            return
        [table] = self._told.tensors()
        own = {
            row[VALUE] for row in table.tolist() if row[HAS_SAMPLES] and not math.isnan(row[VALUE])
        }
        self._told = None
        if 1.0 in own and len(own) > 1:
            raise InputError(
                "the loss of a rank was divided by 1, others by other numbers",
                code="loss-divided-by-one",
                where="accelerator.backward, one step before",
                why="whether there was one item to count, or none and the number is 1 at least, "
                "cannot be told, and the loss of the whole batch depends on it",
                fix=FIX_GIVE_COUNT,
            )


def _choose_column(table: Sequence[Sequence[float]]) -> int:
    """Return the column with the weights: the loop's count, the graph's denominator, or the rows if
    equal on all ranks."""
    known = [row for row in table if row[HAS_SAMPLES]]
    if not any(math.isnan(row[GIVEN_COUNT]) for row in known):
        _check_terms(known)
        return GIVEN_COUNT
    alike = all(_have_equal_ratios(row[TERMS:VALUE], known[0][TERMS:VALUE]) for row in known)
    idle = len(known) < len(table)
    equal = all(math.isclose(row[TERMS], known[0][TERMS], rel_tol=1e-6) for row in known)
    if alike and not (idle and equal and len(known) > 1):
        return TERMS
    if not idle and len({row[ROWS] for row in known}) == 1:
        return ROWS
    if alike:
        raise InputError(
            "a rank has no samples, and the loss is divided by a number of all ranks",
            code="loss-without-samples",
            where="accelerator.backward",
            why="the number counts the sample that stands in on the rank without any",
            fix="use batches of at least as many samples as there are devices, or plan without "
            "the slowest device",
        )
    raise InputError(
        "nothing tells what the loop's loss is a mean over, and ranks have unlike numbers of "
        "samples",
        code="loss-mean-unknown-in-loop",
        where="accelerator.backward",
        why="its autograd graph has operations after the mean or sum, or terms that are means over "
        "different things",
        fix=FIX_GIVE_COUNT,
    )


def _check_terms(known: Sequence[Sequence[float]]) -> None:
    """Raise InputError if no single count weighs all terms of the ranks' losses."""
    terms = [[n for n in row[TERMS:VALUE] if not math.isnan(n)] for row in known]
    if min(map(len, terms)) < 2 or len(set(map(len, terms))) > 1:
        return
    if not all(_have_equal_ratios(row, terms[0]) for row in terms):
        raise InputError(
            "terms of the loop's loss are means over different things, and one count was given",
            code="loss-terms-of-other-means",
            where="accelerator.backward",
            why="no number weighs all terms: "
            + "; ".join("over " + " and ".join(f"{n:g}" for n in row) for row in terms[:2])
            + " on two ranks",
            fix="make all terms means over the same items, such as samples",
        )


def _have_equal_ratios(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if the denominators of all terms of two ranks' losses have equal ratios."""
    pairs = [(a, b) for a, b in zip(one, other) if not (math.isnan(a) and math.isnan(b))]
    ratios = [a / b if b else math.nan for a, b in pairs]
    return bool(pairs) and all(math.isclose(r, ratios[0], rel_tol=1e-6) for r in ratios)
