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

# Of a leaf None, of a tuple, a list and a dict the structures of their items, of other values
# pytree's own.
Structure = Union[
    None,
    tuple["Structure", ...],
    list["Structure"],
    dict[Any, "Structure"],
    "OfObject",
    TreeSpec,
]


@dataclass(frozen=True)
class OfObject:
    """The structure of an object that `is_open`: its class, and what its attributes hold."""

    kind: type[Any]
    attributes: dict[str, Structure]


def is_open(value: Any) -> bool:
    """Whether a value is an object that holds others for blocks to share: a dict in the shape of an
    object, a cache, a layer of one. To pytree it is a leaf."""
    kind = type(value)
    return issubclass(kind, UserDict) or (
        hasattr(kind, "get_seq_length") and hasattr(value, "__dict__")
    )


def flatten(value: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of a value to `leaves`; returns how they were put together."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        leaves.append(value)
        return None
    if kind is tuple:
        return tuple([flatten(item, leaves) for item in value])
    if kind is list:
        return [flatten(item, leaves) for item in value]
    if kind is dict:
        return {key: flatten(item, leaves) for key, item in value.items()}
    if is_open(value):
        return OfObject(kind, {name: flatten(v, leaves) for name, v in vars(value).items()})
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
    if isinstance(structure, list):
        return [unflatten(item, leaves) for item in structure]
    if isinstance(structure, OfObject):
        made = object.__new__(structure.kind)
        vars(made).update({n: unflatten(item, leaves) for n, item in structure.attributes.items()})
        return made
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
