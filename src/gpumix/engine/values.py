"""The values that cross a unit's boundary, as a list of leaves, and put together again.

The leaves are those of `torch.utils._pytree`, in its order, which also handles all that is not said
here. Most calls are of tensors and of tuples of them: for these it takes a fifth of the time.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Union

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Types of leaves that hold no other values.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})

# Of a leaf None, of a tuple and of a dict the structures of their items, of others pytree's own.
Structure = Union[None, tuple["Structure", ...], dict[Any, "Structure"], "OfUserDict", TreeSpec]


@dataclass(frozen=True)
class OfUserDict:
    """The structure of a `collections.UserDict`, which to pytree is a leaf."""

    kind: type[UserDict[Any, Any]]
    items: dict[Any, Structure]
    others: dict[str, Any]  # attributes

    @classmethod
    def of(cls, value: UserDict[Any, Any], leaves: list[Any]) -> OfUserDict:
        others = {name: one for name, one in vars(value).items() if name != "data"}
        items = {key: flatten(item, leaves) for key, item in value.data.items()}
        return cls(type(value), items, others)

    def filled(self, leaves: Iterator[Any]) -> UserDict[Any, Any]:
        """One of the next leaves."""
        made = self.kind.__new__(self.kind)
        items = {key: unflatten(item, leaves) for key, item in self.items.items()}
        vars(made).update(self.others, data=items)
        return made


def flatten(value: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of a value to `leaves`; returns how they were put together."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        leaves.append(value)
        return None
    if kind is tuple:
        return tuple([flatten(item, leaves) for item in value])
    if kind is dict:
        return {key: flatten(item, leaves) for key, item in value.items()}
    if issubclass(kind, UserDict):
        return OfUserDict.of(value, leaves)
    found, structure = tree_flatten(value)
    leaves += found
    return structure


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """A value of this structure, of the next leaves."""
    if structure is None:
        return next(leaves)
    if isinstance(structure, tuple):
        return tuple([unflatten(item, leaves) for item in structure])
    if isinstance(structure, dict):
        return {key: unflatten(item, leaves) for key, item in structure.items()}
    if isinstance(structure, OfUserDict):
        return structure.filled(leaves)
    return tree_unflatten(list(islice(leaves, structure.num_leaves)), structure)


class Arguments(NamedTuple):
    """How the arguments of a call are put together."""

    args: tuple[Structure, ...]
    kwargs: dict[str, Structure]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Arguments]:
        """The leaves of a call's arguments, and their structure."""
        leaves: list[Any] = []
        of_args = tuple([flatten(value, leaves) for value in args])
        return leaves, cls(of_args, {n: flatten(value, leaves) for n, value in kwargs.items()})

    def filled(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of these leaves."""
        rest = iter(leaves)
        return unflatten(self.args, rest), unflatten(self.kwargs, rest)
