"""What batches hold beside tensors with one row for each sample.

Processors of pictures lay the patches of all pictures of a batch into one tensor, and give the
boxes of a picture as a dictionary. A model takes them as they are; whoever cuts a batch must know
what is whose.
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
    """A tensor with the rows of one sample behind those of another, and how many each has. For
    trees it is a node."""

    tensor: Tensor
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, samples: slice | Sequence[int]) -> RaggedRows:
        """The rows of some samples; a view, where these lie one behind the other."""
        numbers = list(range(len(self))[samples] if isinstance(samples, slice) else samples)
        counts = tuple(self.counts[number] for number in numbers)
        first = numbers[0] if numbers else 0
        if numbers == list(range(first, first + len(numbers))):
            begin = sum(self.counts[:first])
            return RaggedRows(self.tensor[begin : begin + sum(counts)], counts)
        parts = self.tensor.split(self.counts)
        return RaggedRows(torch.cat([parts[number] for number in numbers]), counts)

    def repeated(self, times: int) -> RaggedRows:
        """All samples, so many times."""
        return RaggedRows(torch.cat([self.tensor] * times), self.counts * times)

    def pin_memory(self, *args: Any) -> RaggedRows:
        """As loaders ask for it."""
        return RaggedRows(self.tensor.pin_memory(*args), self.counts)


register_pytree_node(
    RaggedRows,
    lambda one: ([one.tensor], one.counts),
    lambda values, counts: RaggedRows(next(iter(values)), counts),
    serialized_type_name="gpumix.engine.ragged.RaggedRows",
)


@dataclass(frozen=True)
class PerSample:
    """A list with an entry for each sample, a tree of tensors, as the boxes in a picture. For trees
    it is a node."""

    entries: list[Any]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, samples: slice | Sequence[int]) -> PerSample:
        if isinstance(samples, slice):
            return PerSample(self.entries[samples])
        return PerSample([self.entries[number] for number in samples])

    def repeated(self, times: int) -> PerSample:
        """All samples, so many times."""
        return PerSample(self.entries * times)

    def pin_memory(self, *args: Any) -> PerSample:
        """As loaders ask for it."""
        return PerSample(tree_map(_pinned, self.entries))


def _pinned(value: Any) -> Any:
    return value.pin_memory() if isinstance(value, Tensor) else value


register_pytree_node(
    PerSample,
    lambda one: (one.entries, None),
    lambda values, _: PerSample(list(values)),
    serialized_type_name="gpumix.engine.ragged.PerSample",
)


def has_rows(value: Any) -> bool:
    """Whether it has rows of samples."""
    return isinstance(value, Tensor | RaggedRows | PerSample)


def take(batch: Any, samples: slice | Sequence[int]) -> Any:
    """Some samples of a batch, a pytree."""
    which = samples if isinstance(samples, slice) else list(samples)
    return tree_map(lambda t: t[which] if has_rows(t) else t, batch, is_leaf=has_rows)


def as_taken(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as models take it: tensors of rows of all samples. Of what no sample has rows of, as
    pictures in a batch of texts, there is nothing."""
    taken: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, RaggedRows):
            if any(value.counts):
                taken[name] = value.tensor
        else:
            taken[name] = value.entries if isinstance(value, PerSample) else value
    return taken
