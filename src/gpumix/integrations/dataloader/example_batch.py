"""Batches for measurements: as large as any batch of a program's dataset.

The longest sample found represents all samples. The shortest is kept too: padded to the longest, it
shows whether padding affects a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from gpumix.engine.batch.batch_split import (
    add_label_before_padding,
    fill_padding_with_tokens,
    find_padding_starts,
    select_samples,
)
from gpumix.engine.comm.process_groups import get_group_device, make_communicator
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.integrations.common.gather import gather_integers
from gpumix.integrations.dataloader.mixed_samples import refuse_mixing
from gpumix.integrations.dataloader.same_data import check_same_data
from gpumix.integrations.dataloader.sharded_loader import collate_by_name, collate_tree, copy_sample
from gpumix.schema.errors import InputError

Make = Callable[[Callable[[list[Any]], Any], list[Any]], Any]
MAX_SAMPLES = 4096  # samples, in order; samples of a stream would be read again
MAX_STREAM_SAMPLES = 256
MAX_SEARCH_S = 2.0  # maximum time
MAX_COLLATED_SAMPLES = 16  # samples, each alone
TOKENS = "input_ids"


@dataclass(frozen=True)
class ExampleBatches:
    """Maker of batches that repeat a sample.

    Attributes:
        sequence_length: tokens of the sample; 1 without tokens.
        shortest: the shortest sample found.
        make: makes a batch from a collator and samples.
    """

    sample: Any
    collate: Callable[[list[Any]], Any]
    sequence_length: int
    shortest: Any = None
    make: Make = collate_tree

    def batch(self, samples: int) -> Any:
        with count_as_host_memory():
            return self.make(self.collate, [copy_sample(self.sample) for _ in range(samples)])

    def padded(self) -> tuple[Any, Any] | None:
        """Return batches of the shortest sample, alone and padded to the longest; None if both are
        equal, or the samples do not collate: no batch then mixes lengths."""
        with count_as_host_memory():
            alone = self.make(self.collate, [copy_sample(self.shortest)])
            try:
                both = self.make(
                    self.collate, [copy_sample(self.shortest), copy_sample(self.sample)]
                )
            except (ValueError, TypeError, RuntimeError):
                return None
        padded = select_samples(both, slice(1))
        if isinstance(padded, dict) and (width := find_padding_starts(padded, [range(1)])[0]):
            # Cut from the padded batch: random values of the collator stay equal.
            alone = {key: value[:, :width].contiguous() for key, value in padded.items()}
        if _shapes(alone) == _shapes(padded):
            return None
        return add_label_before_padding(alone), fill_padding_with_tokens(
            add_label_before_padding(padded)
        )


def find_example(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    check: Make = collate_by_name,
) -> ExampleBatches:
    """Return the longest sample of the inspected part of a dataset, equal on all ranks. Collective.

    Args:
        check: collates two samples and checks the batch.

    Raises:
        InputError: there is no sample, ranks have different datasets, or batches mix samples.
    """
    check_same_data(dataset)
    with count_as_host_memory():
        shortest, longest = _extremes(dataset)
        if longest is None:
            raise InputError("the dataset has no samples", code="dataset-empty", fix="give it some")
        batch = check(collate, [copy_sample(longest), copy_sample(longest)])
        if make_communicator(get_group_device()).world > 1:
            refuse_mixing(
                collate, (sample for _, sample in islice(_in_order(dataset), MAX_COLLATED_SAMPLES))
            )
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    known = isinstance(tokens, Tensor) and tokens.dim() == 2
    own = tokens.shape[1] if known else 1  # type: ignore[union-attr]
    # A collator may draw the length of a batch; the plan must be equal on all ranks.
    every = gather_integers([own], "comparison of lengths of samples")
    return ExampleBatches(longest, collate, max(length for (length,) in every), shortest, check)


def needs_padding(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Return True if samples of a dataset differ in shape after collating. Collective."""
    specimen = find_example(dataset, collate)
    differ = specimen.padded() is not None
    if not differ:
        with count_as_host_memory():
            some = [sample for _, sample in islice(_in_order(dataset), MAX_COLLATED_SAMPLES)]
            alone = [_shapes(specimen.make(collate, [copy_sample(sample)])) for sample in some]
        differ = any(shapes != alone[0] for shapes in alone)
    return any(
        found for (found,) in gather_integers([int(differ)], "comparison of shapes of samples")
    )


def _shapes(batch: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _extremes(dataset: Any) -> tuple[Any, Any]:
    """Return the shortest and the longest sample found by any rank in its time; None for an empty
    dataset. Collective."""
    found: dict[int, tuple[int, int, Any]] = {}  # by sign: sign * length, place, sample
    begun, samples = time.monotonic(), _samples(dataset)
    for place, sample in samples:
        length = _length(sample)
        for sign in (-1, 1):
            if sign not in found or sign * length > found[sign][0]:
                found[sign] = sign * length, place, sample
        if time.monotonic() - begun > MAX_SEARCH_S:
            break
    return _choose_across_ranks(dataset, samples, found.get(-1)), _choose_across_ranks(
        dataset, samples, found.get(1)
    )


def _choose_across_ranks(
    dataset: Any, samples: Iterator[tuple[int, Any]], found: tuple[int, int, Any] | None
) -> Any:
    """Return the sample of the rank with the most extreme sample. Collective."""
    length, own, sample = found or (-(2**40), 0, None)
    place = -max(gather_integers([length, -own], "comparison of samples"))[1]
    if place == own:
        return sample
    if not isinstance(dataset, IterableDataset):
        return dataset[place] if place < len(dataset) else sample
    return next((one for at, one in samples if at == place), sample)


def _samples(dataset: Any) -> Iterator[tuple[int, Any]]:
    """Yield places and samples: the extremes, if known, or in order."""
    places = () if isinstance(dataset, IterableDataset) else _extreme_places(dataset)
    if places:
        yield from ((place, dataset[place]) for place in places)
    else:
        yield from _in_order(dataset)


def _in_order(dataset: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(dataset, IterableDataset):
        yield from enumerate(islice(dataset, MAX_STREAM_SAMPLES))
    else:
        yield from ((place, dataset[place]) for place in range(min(len(dataset), MAX_SAMPLES)))


def _extreme_places(dataset: Any) -> tuple[int, ...]:
    """Return the places of the longest and the shortest sample in a `datasets.Dataset` with lists
    of tokens."""
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
    if (shown := getattr(dataset, "_indices", None)) is not None:  # reorders the table
        lengths = lengths.take(shown.column(0))
    numbers = lengths.to_numpy()
    return int(numbers.argmax()), int(numbers.argmin())


def _length(sample: Any) -> int:
    """Return a sample's length in tokens, in elements without tokens, or in characters for text."""
    if isinstance(sample, Mapping) and hasattr(sample.get(TOKENS), "__len__"):
        return _tokens(sample[TOKENS])
    values = list(sample.values()) if isinstance(sample, Mapping) else sample
    if not isinstance(values, tuple | list):
        values = [values]
    return sum(map(_elements, values)) or sum(len(v) for v in values if isinstance(v, str))


def _tokens(value: Any) -> int:
    """Return the tokens of the longest row: a sample of multiple choice has several."""
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


def has_columns(dataset: Any) -> bool:
    """Return True if a dataset knows its columns, so unused columns can be removed; a stream of
    `datasets` may not know any."""
    if find_spec("datasets") is None:
        return False
    from datasets import Dataset

    return isinstance(dataset, Dataset)
