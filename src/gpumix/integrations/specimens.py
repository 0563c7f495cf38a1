"""Batches to measure with: as large as any that a program's dataset gives.

Of samples of unlike length the longest one that is found stands for all. The first sample is kept
too: padded to the longest one's length, it shows whether padding counts for a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from gpumix.engine.groups import all_ranks, device_of_group
from gpumix.engine.ragged import take
from gpumix.engine.samples import padded_from, with_last_label, with_words_for_padding
from gpumix.hardware.memory import host_memory
from gpumix.integrations.gathering import all_numbers
from gpumix.integrations.mixed_samples import refuse_mixing
from gpumix.integrations.own_batches import collated, collated_tree, fresh
from gpumix.integrations.same_data import check_same_data
from gpumix.spec.errors import InputError

Make = Callable[[Callable[[list[Any]], Any], list[Any]], Any]
LOOKED_AT = 4096  # samples, in order; those of a stream would be read again
OF_STREAM = 256
LOOKS_S = 2.0  # and no longer than this
COLLATED = 16  # samples, each alone
TOKENS = "input_ids"


@dataclass(frozen=True)
class Specimen:
    """Makes batches of one sample.

    Attributes:
        sequence_length: its tokens; 1 where it has none.
        shortest: the shortest sample that was found.
        make: makes a batch of a collator and samples.
    """

    sample: Any
    collate: Callable[[list[Any]], Any]
    sequence_length: int
    shortest: Any = None
    make: Make = collated_tree

    def batch(self, samples: int) -> Any:
        with host_memory():
            return self.make(self.collate, [fresh(self.sample) for _ in range(samples)])

    def padded(self) -> tuple[Any, Any] | None:
        """Batches of the shortest sample, alone and padded as beside the longest one; None if that
        is the same, or the collator pads nothing: then no batch has samples of unlike length."""
        with host_memory():
            alone = self.make(self.collate, [fresh(self.shortest)])
            try:
                both = self.make(self.collate, [fresh(self.shortest), fresh(self.sample)])
            except (ValueError, TypeError, RuntimeError):
                return None
        beside = take(both, slice(1))
        if isinstance(beside, dict) and (width := padded_from(beside, [range(1)])[0]):
            # What a collator draws is the same then.
            alone = {key: value[:, :width].contiguous() for key, value in beside.items()}
        if _shapes(alone) == _shapes(beside):
            return None
        return with_last_label(alone), with_words_for_padding(with_last_label(beside))


def specimen_of(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    check: Make = collated,
) -> Specimen:
    """The longest sample of a dataset, or of as much of it as can be looked at; the same on all
    ranks. Collective.

    Args:
        check: collates two samples, if batches are as they should be.

    Raises:
        InputError: there is none, ranks have unlike datasets, or batches mix samples.
    """
    check_same_data(dataset)
    with host_memory():
        shortest, longest = _extremes(dataset)
        if longest is None:
            raise InputError("the dataset has no samples", fix="give it some")
        batch = check(collate, [fresh(longest), fresh(longest)])
        if all_ranks(device_of_group()).world > 1:
            refuse_mixing(collate, (sample for _, sample in islice(_in_order(dataset), COLLATED)))
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    known = isinstance(tokens, Tensor) and tokens.dim() == 2
    own = tokens.shape[1] if known else 1  # type: ignore[union-attr]
    # A collator may draw how long it makes a batch, and the plan must be the same on all ranks.
    every = all_numbers([own], "comparison of lengths of samples")
    return Specimen(longest, collate, max(length for (length,) in every), shortest, check)


def are_padded(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Whether samples of a dataset are of unlike shape when they are collated. Collective."""
    specimen = specimen_of(dataset, collate)
    differ = specimen.padded() is not None
    if not differ:
        with host_memory():
            some = [sample for _, sample in islice(_in_order(dataset), COLLATED)]
            alone = [_shapes(specimen.make(collate, [fresh(sample)])) for sample in some]
        differ = any(shapes != alone[0] for shapes in alone)
    return any(found for (found,) in all_numbers([int(differ)], "comparison of shapes of samples"))


def _shapes(batch: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _extremes(dataset: Any) -> tuple[Any, Any]:
    """The shortest and the longest of what any rank found while it looked: the others' time may not
    have sufficed for it. Collective. None of an empty dataset."""
    found: dict[int, tuple[int, int, Any]] = {}  # by sign: its length times that, place, sample
    begun, samples = time.monotonic(), _samples(dataset)
    for place, sample in samples:
        length = _length(sample)
        for sign in (-1, 1):
            if sign not in found or sign * length > found[sign][0]:
                found[sign] = sign * length, place, sample
        if time.monotonic() - begun > LOOKS_S:
            break
    return _agreed(dataset, samples, found.get(-1)), _agreed(dataset, samples, found.get(1))


def _agreed(
    dataset: Any, samples: Iterator[tuple[int, Any]], found: tuple[int, int, Any] | None
) -> Any:
    """The sample of the rank that found the most extreme one. Collective."""
    length, own, sample = found or (-(2**40), 0, None)
    place = -max(all_numbers([length, -own], "comparison of samples"))[1]
    if place == own:
        return sample
    if not isinstance(dataset, IterableDataset):
        return dataset[place] if place < len(dataset) else sample
    return next((one for at, one in samples if at == place), sample)


def _samples(dataset: Any) -> Iterator[tuple[int, Any]]:
    """With their places: the extreme ones, where these are known, else in order."""
    places = () if isinstance(dataset, IterableDataset) else _extreme_places(dataset)
    if places:
        yield from ((place, dataset[place]) for place in places)
    else:
        yield from _in_order(dataset)


def _in_order(dataset: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(dataset, IterableDataset):
        yield from enumerate(islice(dataset, OF_STREAM))
    else:
        yield from ((place, dataset[place]) for place in range(min(len(dataset), LOOKED_AT)))


def _extreme_places(dataset: Any) -> tuple[int, ...]:
    """Where the longest and the shortest sample are, of a `datasets.Dataset` that keeps lists of
    tokens."""
    table = getattr(dataset, "data", None)
    columns = getattr(dataset, "column_names", None) or ()
    if TOKENS not in columns or table is None or not len(dataset):
        return ()
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(TOKENS)
    if not pa.types.is_integer(column.type.value_type):
        return ()  # several rows in a sample
    lengths = pc.list_value_length(column)
    if (shown := getattr(dataset, "_indices", None)) is not None:  # of its table, in another order
        lengths = lengths.take(shown.column(0))
    numbers = lengths.to_numpy()
    return int(numbers.argmax()), int(numbers.argmin())


def _length(sample: Any) -> int:
    """In tokens, where it has any, else in elements; of text alone, in characters."""
    if isinstance(sample, Mapping) and hasattr(sample.get(TOKENS), "__len__"):
        return _tokens(sample[TOKENS])
    values = list(sample.values()) if isinstance(sample, Mapping) else sample
    if not isinstance(values, tuple | list):
        values = [values]
    return sum(map(_elements, values)) or sum(len(v) for v in values if isinstance(v, str))


def _tokens(value: Any) -> int:
    """Of the longest row, where a sample has several, as those of multiple choice have."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.shape[-1])
    rows = [len(row) for row in value if hasattr(row, "__len__") and not isinstance(row, str)]
    return max(rows, default=len(value))


def _elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if hasattr(value, "__len__") and not isinstance(value, str) else 0
