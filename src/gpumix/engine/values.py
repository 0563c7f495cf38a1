"""The values that cross a unit's boundary, as a list of leaves, and put together again.

The leaves are those of `torch.utils._pytree`, in its order, which also handles all that is not said
here. Most calls are of tensors and of tuples of them: for these it takes a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Types of leaves that hold no other values.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})

# Of a leaf None, of a tuple and of a dict the structures of their items, of others pytree's own.
Structure = None | tuple["Structure", ...] | dict[Any, "Structure"] | TreeSpec


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
    return tree_unflatten(list(islice(leaves, structure.num_leaves)), structure)


def only_tuples(structure: Structure) -> bool:
    """Whether a value of this structure is a leaf or tuples of leaves, which nobody can change."""
    return structure is None or (isinstance(structure, tuple) and all(map(only_tuples, structure)))


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

    def still_hold(
        self, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether arguments that were made of these leaves are what they were."""
        if only_tuples(self.args) and all(map(only_tuples, self.kwargs.values())):
            return True  # nobody can change them
        found, structure = Arguments.of(args, kwargs)
        return structure == self and all(a is b for a, b in zip(found, leaves))
