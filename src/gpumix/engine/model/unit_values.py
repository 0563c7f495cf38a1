"""Values crossing a unit's boundary, as a list of leaves with a structure for reassembly.

Leaves and their order are those of `torch.utils._pytree`, which also handles all types not handled
here. Most calls are of tensors and tuples of tensors, for which this takes a fifth of the time.
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

# None for a leaf; for a tuple, list or dict the structures of the items; for other values pytree's
# own structure.
Structure = Union[
    None,
    tuple["Structure", ...],
    list["Structure"],
    dict[Any, "Structure"],
    "ObjectStructure",
    TreeSpec,
]


@dataclass(frozen=True)
class ObjectStructure:
    """Structure of an object with `is_attribute_container`: class, and structures of attributes."""

    kind: type[Any]
    attributes: dict[str, Structure]


def is_attribute_container(value: Any) -> bool:
    """Return True for an object of values shared by blocks: a dict-like object, a cache, or a layer
    of a cache. For pytree the object is a leaf."""
    kind = type(value)
    return issubclass(kind, UserDict) or (
        hasattr(kind, "get_seq_length") and hasattr(value, "__dict__")
    )


def flatten(value: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of a value to `leaves`; return the structure."""
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
    if is_attribute_container(value):
        return ObjectStructure(kind, {name: flatten(v, leaves) for name, v in vars(value).items()})
    found, structure = tree_flatten(value)
    leaves += found
    return structure


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Build a value of a structure from the next leaves."""
    if structure is None:
        return next(leaves)
    if isinstance(structure, tuple):
        return tuple([unflatten(item, leaves) for item in structure])
    if isinstance(structure, dict):
        return {key: unflatten(item, leaves) for key, item in structure.items()}
    if isinstance(structure, list):
        return [unflatten(item, leaves) for item in structure]
    if isinstance(structure, ObjectStructure):
        made = object.__new__(structure.kind)
        vars(made).update({n: unflatten(item, leaves) for n, item in structure.attributes.items()})
        return made
    return tree_unflatten(list(islice(leaves, structure.num_leaves)), structure)


class ArgumentsStructure(NamedTuple):
    """Structure of the arguments of a call."""

    args: tuple[Structure, ...]
    kwargs: dict[str, Structure]

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], ArgumentsStructure]:
        """Return the leaves of a call's arguments, with the structure."""
        leaves: list[Any] = []
        of_args = tuple([flatten(value, leaves) for value in args])
        return leaves, cls(of_args, {n: flatten(value, leaves) for n, value in kwargs.items()})

    def filled(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with the given leaves."""
        rest = iter(leaves)
        return unflatten(self.args, rest), unflatten(self.kwargs, rest)


def wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
