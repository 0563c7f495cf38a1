"""Whether ranks that are to compute the same samples were given the same ones.

Ranks of several stages, and of a team, read the same part of a batch. A loop that feeds each of
them with something else would train, without an error, on nonsense; so once they tell each other
what they were given, as a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpumix.spec.plan import Plan

MASK = 2**40 - 1  # sums over thousands of ranks are exact in float64


def digest(batch: Any, rows: Sequence[range]) -> int:
    """Of a rank's samples, which are these rows of the global batch: those of several ranks add up
    to the same, whoever has which of them."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    found, begin = 0, 0
    for of_one in rows:
        own = [_number(leaf[begin : begin + len(of_one)]) for leaf in leaves]
        parts = (number * (of_one.start + 1) * (2 * place + 1) for place, number in enumerate(own))
        found = (found + sum(parts)) & MASK
        begin += len(of_one)
    return found


def _number(tensor: torch.Tensor) -> int:
    """Another one for other values; on every device the same."""
    whole = tensor.float().view(torch.int32) if tensor.is_floating_point() else tensor
    flat = whole.reshape(-1).to(torch.int64)
    places = torch.arange(1, 2 * flat.numel() + 1, 2, device=flat.device)
    return int((flat * places).sum().item()) & MASK


def unlike(plan: Plan, digests: Sequence[int]) -> str:
    """Which ranks were given other samples than they should, in words; empty if none. By rank the
    digest of each."""
    sums = []
    for number, stage in enumerate(plan.stages):
        ranks = plan.ranks_of(number)
        for first in range(0, len(ranks), stage.tensor):
            team = ranks[first : first + stage.tensor]
            if len({digests[rank] for rank in team}) > 1:
                return f"ranks {', '.join(map(str, team))}, which are a team, have other ones each"
        sums.append(sum(digests[rank] for rank in ranks[:: stage.tensor]) & MASK)
    other = next((number for number, one in enumerate(sums) if one != sums[0]), None)
    return "" if other is None else f"stage {other + 1} has other ones than stage 1"
