"""Batches to measure with: as large as any that a program's dataset gives.

Of samples of unlike length the longest one that is found stands for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from gpumix.hardware.memory import host_memory
from gpumix.integrations.own_batches import collated, collated_tree
from gpumix.spec.errors import InputError

LOOKED_AT = 4096  # samples, in order; those of a stream would be read again
OF_STREAM = 256
LOOKS_S = 2.0  # and no longer than this
TOKENS = "input_ids"


@dataclass(frozen=True)
class Specimen:
    """Makes batches of one sample.

    Attributes:
        sequence_length: its tokens; 1 where it has none.
    """

    sample: Any
    collate: Callable[[list[Any]], Any]
    sequence_length: int

    def batch(self, samples: int) -> Any:
        with host_memory():
            # A collator may change what it is given.
            return collated_tree(self.collate, [_fresh(self.sample) for _ in range(samples)])


def specimen_of(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    check: Callable[[Callable[[list[Any]], Any], list[Any]], Any] = collated,
) -> Specimen:
    """The longest sample of a dataset, or of as much of it as can be looked at.

    Args:
        check: collates two samples, if batches are as they should be.

    Raises:
        InputError: there is none.
    """
    longest: Any = None
    with host_memory():
        begun, most = time.monotonic(), -1
        for sample in _samples(dataset):
            if (length := _length(sample)) > most:
                longest, most = sample, length
            if time.monotonic() - begun > LOOKS_S:
                break
        if longest is None:
            raise InputError("the dataset has no samples", fix="give it some")
        batch = check(collate, [_fresh(longest), _fresh(longest)])
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    known = isinstance(tokens, Tensor) and tokens.dim() == 2
    return Specimen(longest, collate, tokens.shape[1] if known else 1)  # type: ignore[union-attr]


def _samples(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        yield from islice(dataset, OF_STREAM)
        return
    if (place := _longest_of(dataset)) is not None:
        yield dataset[place]
        return
    yield from (dataset[place] for place in range(min(len(dataset), LOOKED_AT)))


def _longest_of(dataset: Any) -> int | None:
    """Where the longest sample is, of a `datasets.Dataset` that keeps lists of tokens."""
    table = getattr(dataset, "data", None)
    if TOKENS not in (getattr(dataset, "column_names", None) or ()) or table is None:
        return None
    if getattr(dataset, "_indices", None) is not None:  # it shows others than its table holds
        return None
    import pyarrow.compute as pc

    lengths = pc.list_value_length(table.column(TOKENS))
    return int(lengths.to_numpy().argmax()) if len(lengths) else None


def _length(sample: Any) -> int:
    """In tokens, where it has any."""
    tokens = sample.get(TOKENS) if isinstance(sample, Mapping) else None
    return len(tokens) if hasattr(tokens, "__len__") else 0  # type: ignore[arg-type]


def _fresh(sample: Any) -> Any:
    if not isinstance(sample, Mapping):
        return sample
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in sample.items()
    }
