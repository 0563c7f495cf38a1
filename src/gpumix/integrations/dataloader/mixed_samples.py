"""Check for collate functions mixing samples of a batch, as in mixed images or weights that add up
to 1: each rank collates its own part of a batch, so values would depend on the plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from gpumix.engine.model.rng import preserve_all_rng
from gpumix.integrations.dataloader.sharded_loader import copy_sample
from gpumix.schema.errors import InputError

Collate = Callable[[list[Any]], Any]


def refuse_mixing(collate: Collate, samples: Iterable[Any]) -> None:
    """Collate a sample with two different samples in turn, drawing equal random numbers.

    Args:
        collate: makes a batch of samples, which it may change.
        samples: of a dataset; no more are read than needed, mostly three.

    Raises:
        InputError: no row is equal in both batches.
    """
    collate = _copy_collate(collate)
    with preserve_all_rng():
        left = iter(samples)
        pair = list(islice(left, 2))
        first = _collate_pair(collate, pair)
        if first is None or not _has_equal_rows(first, _collate_pair(collate, pair)):
            return  # it draws random numbers of its own
        for other in left:
            second = _collate_pair(collate, [pair[0], other])
            if second is None or _shapes(second) != _shapes(first):
                continue
            if not any(
                all(_equal(a[row], b[place]) for a, b in zip(first, second))
                for row, place in product((0, 1), repeat=2)
            ):
                raise InputError(
                    "the collate function makes a sample's values from other samples of the batch",
                    code="collate-mixes-samples",
                    where=getattr(collate, "__name__", type(collate).__name__),
                    why="each rank collates its own part of a batch, so these values would depend "
                    "on the plan",
                    fix="compute them of each sample alone, in the dataset or in forward",
                )
            return


def _copy_collate(collate: Collate) -> Collate:
    """Return a copy, which may draw numbers and count calls."""
    try:
        return copy.deepcopy(collate)
    except Exception:  # from any of its attributes
        return collate


def _collate_pair(collate: Collate, samples: Sequence[Any]) -> list[Tensor] | None:
    """Return the tensors with a row for each of two samples; None if samples do not collate."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        leaves = tree_flatten(collate([copy_sample(one) for one in samples]))[0]
    except (ValueError, TypeError, RuntimeError, LookupError):
        return None  # reported by other checks
    found = [t for t in leaves if isinstance(t, Tensor) and t.dim() and len(t) == 2]
    return found if len(samples) == 2 and found else None


def _shapes(rows: Sequence[Tensor]) -> list[torch.Size]:
    return [t.shape for t in rows]


def _has_equal_rows(first: Sequence[Tensor], second: Sequence[Tensor] | None) -> bool:
    return (
        second is not None
        and _shapes(first) == _shapes(second)
        and all(_equal(a, b) for a, b in zip(first, second))
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
