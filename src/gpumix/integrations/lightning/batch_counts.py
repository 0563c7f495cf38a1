"""Numbers that a value logged for a batch may be a mean over, counted in the batch's tensors.

The graph of a loss tells what it is divided by. A number of hits, divided by a number of labels,
has no graph; what it is divided by is often a count of something in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from gpumix.engine.batch.batch_split import IGNORED_LABEL, count_samples
from gpumix.engine.loss.reduction import SAMPLES, AlternativeRule, ReducedLoss

MOST_TENSORS = 8  # of a batch, in which is counted
SHIFTED = "shifted "  # without the first column


class UnlikeSamples(ReducedLoss):
    """Choice of samples for a comparison: those with unlike counts."""

    def __init__(self) -> None:
        super().__init__(lambda *_: torch.zeros(()), lambda batch: {})
        self.alternatives = (
            AlternativeRule(SAMPLES, 1.0),
        )  # unlike samples matter more than their padding

    def counts_by_row(self, batch: Any) -> Tensor:
        counted = [torch.ones(count_samples(batch), dtype=torch.float64)]
        counted += [rows.double().cpu() for _, rows in _count_rows(batch, AllNames())]
        # Samples without any are chosen too, unlike those for a loss.
        return torch.stack(counted).nan_to_num() + 1.0


def count_in_batch(batch: Any, ways: Container[str]) -> dict[str, Tensor]:
    """Return the counts of a micro-batch by name, those of `ways`. Waits for no device."""
    return {way: rows.sum() for way, rows in _count_rows(batch, ways)}


class AllNames(Container[str]):
    """Container of all names."""

    def __contains__(self, name: object) -> bool:
        return True


def _count_rows(batch: Any, ways: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each count, and the counts of samples."""
    samples, left = count_samples(batch), MOST_TENSORS
    for path, leaf in tree_flatten_with_path(batch)[0]:
        is_counted = isinstance(leaf, Tensor) and leaf.dim() in (1, 2) and not leaf.is_complex()
        if not left or not is_counted or len(leaf) != samples:
            continue
        left -= 1
        for kind, count in _list_counts(leaf):
            for shifted in ("", SHIFTED)[: leaf.dim()]:
                way = f"{kind} of {shifted}batch{keystr(path)}"
                if way in ways:
                    yield way, count(leaf[:, 1:] if shifted else leaf).reshape(samples, -1).sum(1)


def _list_counts(leaf: Tensor) -> Sequence[tuple[str, Callable[[Tensor], Tensor]]]:
    if leaf.is_floating_point():
        return (("sum", _as_weights),)
    nonzero = ("number", lambda own: own != 0)
    return (
        (nonzero,)
        if leaf.dtype == torch.bool
        else (nonzero, ("labels", lambda own: own != IGNORED_LABEL))
    )


def _as_weights(own: Tensor) -> Tensor:
    """Return numbers as weights; NaN if some are negative."""
    own = own.detach().double()
    return torch.where((own < 0).any(), torch.nan, own)


UNLIKE_SAMPLES = UnlikeSamples()
