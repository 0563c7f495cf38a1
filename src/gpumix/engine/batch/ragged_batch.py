"""Ragged and per-sample batch entries, in addition to tensors with a row per sample.

Image processors concatenate the patches of all pictures of a batch into one tensor, and give the
boxes of a picture as a dictionary. Models take such entries as they are; to cut a batch, the owner
of each row must be known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map


@dataclass(frozen=True)
class RaggedRows:
    """Tensor of the concatenated rows of samples, with each sample's row count. A pytree node."""

    tensor: Tensor
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, samples: slice | Sequence[int]) -> RaggedRows:
        """Return the rows of some samples; a view if the samples are adjacent."""
        numbers = list(range(len(self))[samples] if isinstance(samples, slice) else samples)
        counts = tuple(self.counts[number] for number in numbers)
        first = numbers[0] if numbers else 0
        if numbers == list(range(first, first + len(numbers))):
            begin = sum(self.counts[:first])
            return RaggedRows(self.tensor[begin : begin + sum(counts)], counts)
        parts = self.tensor.split(self.counts)
        return RaggedRows(torch.cat([parts[number] for number in numbers]), counts)

    def repeated(self, times: int) -> RaggedRows:
        """Return all samples, repeated `times` times."""
        return RaggedRows(torch.cat([self.tensor] * times), self.counts * times)

    def pin_memory(self, *args: Any) -> RaggedRows:
        """Return a copy in pinned memory, for data loaders."""
        return RaggedRows(self.tensor.pin_memory(*args), self.counts)


register_pytree_node(
    RaggedRows,
    lambda one: ([one.tensor], one.counts),
    lambda values, counts: RaggedRows(next(iter(values)), counts),
    serialized_type_name="gpumix.engine.batch.ragged_batch.RaggedRows",
)


@dataclass(frozen=True)
class SampleEntries:
    """List with an entry per sample, a tree of tensors such as the boxes in a picture. A pytree
    node."""

    entries: list[Any]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, samples: slice | Sequence[int]) -> SampleEntries:
        if isinstance(samples, slice):
            return SampleEntries(self.entries[samples])
        return SampleEntries([self.entries[number] for number in samples])

    def repeated(self, times: int) -> SampleEntries:
        """Return all samples, repeated `times` times."""
        return SampleEntries(self.entries * times)

    def pin_memory(self, *args: Any) -> SampleEntries:
        """Return a copy in pinned memory, for data loaders."""
        return SampleEntries(tree_map(_pin_tensor, self.entries))


def _pin_tensor(value: Any) -> Any:
    return value.pin_memory() if isinstance(value, Tensor) else value


register_pytree_node(
    SampleEntries,
    lambda one: (one.entries, None),
    lambda values, _: SampleEntries(list(values)),
    serialized_type_name="gpumix.engine.batch.ragged_batch.SampleEntries",
)


def to_model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch as models take it: tensors with the rows of all samples. Ragged entries
    without rows, such as pictures in a batch of texts, are left out."""
    taken: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, RaggedRows):
            if any(value.counts):
                taken[name] = value.tensor
        else:
            taken[name] = value.entries if isinstance(value, SampleEntries) else value
    return taken
