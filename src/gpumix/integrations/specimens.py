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
from gpumix.integrations.gathering import all_numbers
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
    """The longest sample of a dataset, or of as much of it as can be looked at; the same on all
    ranks. Collective.

    Args:
        check: collates two samples, if batches are as they should be.

    Raises:
        InputError: there is none.
    """
    with host_memory():
        longest = _longest(dataset)
        if longest is None:
            raise InputError("the dataset has no samples", fix="give it some")
        batch = check(collate, [_fresh(longest), _fresh(longest)])
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    known = isinstance(tokens, Tensor) and tokens.dim() == 2
    own = tokens.shape[1] if known else 1  # type: ignore[union-attr]
    # A collator may draw how long it makes a batch, and the plan must be the same on all ranks.
    every = all_numbers([own], "comparison of lengths of samples")
    return Specimen(longest, collate, max(length for (length,) in every))


def _longest(dataset: Any) -> Any:
    """The longest of what any rank found while it looked: the others' time may not have sufficed
    for it. Collective. None of an empty dataset."""
    longest, most, found = None, -1, 0
    begun, samples = time.monotonic(), _samples(dataset)
    for place, sample in samples:
        if (length := _length(sample)) > most:
            longest, most, found = sample, length, place
        if time.monotonic() - begun > LOOKS_S:
            break
    every = all_numbers([most, -found], "comparison of samples")
    place = -max(every)[1]
    if place == found:
        return longest
    if not isinstance(dataset, IterableDataset):
        return dataset[place] if place < len(dataset) else longest
    return next((sample for at, sample in samples if at == place), longest)


def _samples(dataset: Any) -> Iterator[tuple[int, Any]]:
    """With their places."""
    if isinstance(dataset, IterableDataset):
        yield from enumerate(islice(dataset, OF_STREAM))
        return
    place = _longest_of(dataset)
    places = range(min(len(dataset), LOOKED_AT)) if place is None else [place]
    yield from ((place, dataset[place]) for place in places)


def _longest_of(dataset: Any) -> int | None:
    """Where the longest sample is, of a `datasets.Dataset` that keeps lists of tokens."""
    table = getattr(dataset, "data", None)
    columns = getattr(dataset, "column_names", None) or ()
    if TOKENS not in columns or table is None or not len(dataset):
        return None
    import pyarrow.compute as pc

    lengths = pc.list_value_length(table.column(TOKENS))
    if (shown := getattr(dataset, "_indices", None)) is not None:  # of its table, in another order
        lengths = lengths.take(shown.column(0))
    return int(lengths.to_numpy().argmax())


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
