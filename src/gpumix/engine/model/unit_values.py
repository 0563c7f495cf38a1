"""Values crossing a unit's boundary: arguments, results, and values taken out on other ways.

Arguments and results are lists of leaves with a structure for reassembly. Leaves and their order
are those of `torch.utils._pytree`, which also handles all types not handled here. Most calls are of
tensors and tuples of tensors, for which this takes a fifth of the time.

Two more ways lead out of a unit; the engine treats values on them as additional outputs, so that
their gradients cross the boundary too. Blocks share keys and values of attention, or collect
losses, through a list, dict or cache that the model gives to each: the engine gives a unit copies,
so that a recompute finds the original contents, and then puts the unit's new values into the
model's own. And transformers collects values from inside of units, e.g. router logits, by hooks, in
lists found in a context variable.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Union

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_unflatten

from gpumix.engine.model.forward_coroutine import ModelError

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
# For each changed container, by index: items by key or place, and appended items.
ContainerChanges = dict[int, tuple[dict[Any, Any], list[Any]]]
# By key of a hook's list, and by index of a container.
Collected = tuple[dict[str, list[Any]], ContainerChanges]


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
        # Most items are leaves, which take no call.
        return tuple(
            [next(leaves) if item is None else unflatten(item, leaves) for item in structure]
        )
    if isinstance(structure, dict):
        return {
            key: next(leaves) if item is None else unflatten(item, leaves)
            for key, item in structure.items()
        }
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


class Containers:
    """The lists, dicts and caches among a call's arguments, with their contents at creation.

    Args:
        unit: name of the called unit.
    """

    def __init__(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._unit = unit
        self._all: list[Any] = []
        self._before: list[dict[Any, Any]] = []
        self._others: list[tuple[Any, list[Any], Any]] = []
        if _are_plain(args) and _are_plain(kwargs.values()):  # as of most calls
            return
        self._all = [*_containers(args), *(c for v in kwargs.values() for c in _containers(v))]
        self._before = [_items(container) for container in self._all]
        given = [*args, *kwargs.values()]
        self._others = [
            (one, *tree_flatten(one)) for value in given for one in _iterate_opaque_objects(value)
        ]

    def put(self, *, allowed: bool = True) -> ContainerChanges:
        """Return items put in since creation. Raises a ModelError if changes are not allowed."""
        for other, leaves, structure in self._others:
            found, now = tree_flatten(other)
            if structure != now or any(a is not b for a, b in zip(leaves, found)):
                self._refuse(f"changes a {type(other).__name__}, not")
        return self._new(allowed=allowed)

    def _new(self, *, allowed: bool) -> ContainerChanges:
        found: ContainerChanges = {}
        for number, (container, before) in enumerate(zip(self._all, self._before)):
            now = _items(container)
            if before.keys() - now.keys():
                self._refuse("takes values out of")
            new = {key: v for key, v in now.items() if key not in before or before[key] is not v}
            if not new:
                continue
            appended: list[Any] = []
            if isinstance(container, list):
                appended = [new.pop(place) for place in range(len(before), len(container))]
            if not allowed:
                self._refuse("has a part of the positions, and changes")
            found[number] = new, appended
        return found

    def fill(self, put: ContainerChanges) -> None:
        """Put items from copies into the containers."""
        for number, (items, appended) in put.items():
            container = self._all[number]
            if sum(other is container for other in self._all) > 1:  # there were two copies of it
                self._refuse("is given twice, and changes,")
            held = vars(container) if is_attribute_container(container) else container
            for key, value in items.items():
                held[key] = value
            if appended:
                container.extend(appended)

    def _refuse(self, does: str) -> None:
        raise ModelError(
            f"unit '{self._unit}' {does} a list, dict or cache that it is given",
            code="unit-changes-container",
            why="of a change its backward sees what is put into one container of the model's only",
            fix="return what is new from the unit",
        )


def copy_changes(own: Containers | None, copies: Containers) -> None:
    """Put items from copies into the model's own containers; None: no change is allowed."""
    put = copies.put(allowed=own is not None)
    if own is not None:
        own.fill(put)


def _are_plain(values: Iterable[Any]) -> bool:
    """Return True if the values are tensors, numbers and the like, or tuples of these."""
    for value in values:
        if type(value) in PLAIN_TYPES:
            continue
        if type(value) is not tuple or not _are_plain(value):
            return False
    return True


def _containers(value: Any) -> Iterator[Any]:
    """Yield the containers in a value, outer ones first."""
    if isinstance(value, list | dict) or is_attribute_container(value):
        yield value
    for item in _get_items(value):
        yield from _containers(item)


def _items(container: Any) -> dict[Any, Any]:
    """Return a container's items by key, place or attribute."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container.items() if isinstance(container, dict) else vars(container))


def _get_items(value: Any) -> Iterable[Any]:
    """Return the values inside a value that can be changed item by item."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if is_attribute_container(value) else ()


def _iterate_opaque_objects(value: Any) -> Iterator[Any]:
    """Yield the objects inside a value that contain values in another way."""
    for item in _get_items(value):
        yield from _iterate_opaque_objects(item)
    plain = isinstance(value, tuple | list | dict) or type(value) in PLAIN_TYPES
    if not (plain or is_attribute_container(value) or tree_is_leaf(value)):
        yield value


class OutputCapture:
    """Values collected by the context and the containers of one unit call.

    Args:
        context: context of the model's own code around the call.
        given: the model's own containers; None: there are none, or none may be changed.
    """

    def __init__(self, context: Context, given: Containers | None = None) -> None:
        module = sys.modules.get("transformers.utils.output_capturing")
        self._context = context
        self._variable = getattr(module, "_active_collector", None)
        self._collector: Any = context.run(self._variable.get) if self._variable else None
        self._given = given
        self._put: ContainerChanges = {}

    @property
    def collected(self) -> Collected:
        """The values collected so far."""
        return _select_lists(self._collector or {}), self._put

    def run(
        self, function: Callable[[], Any], copies: Containers | None = None
    ) -> tuple[Any, Collected]:
        """Call `function` in the model's context; return its result and the collected values.

        Args:
            copies: containers passed to the function in place of the model's own.
        """
        context, collected = self.copy_context()
        result = context.run(function)
        put = {} if copies is None else copies.put(allowed=self._given is not None)
        return result, (collected, put)

    def run_unit(
        self,
        unit: str,
        forward: Callable[..., Any],
        arguments: ArgumentsStructure,
        inputs: Sequence[Any],
    ) -> tuple[list[Any], Structure]:
        """Call a unit's `forward` in the model's context, with copies of containers. Return the
        leaves of all results, collected values included, and their structure."""
        args, kwargs = arguments.filled(inputs)
        copies = Containers(unit, args, kwargs)
        leaves: list[Any] = []
        structure = flatten(self.run(lambda: forward(*args, **kwargs), copies), leaves)
        return leaves, structure

    def hand_over(self, leaves: Sequence[Any], structure: Structure) -> Any:
        """Give the collected values of `run_unit` to the model; return the unit's own result."""
        result, collected = unflatten(structure, iter(leaves))
        self.give_to_model(collected)
        return result

    def copy_context(self) -> tuple[Context, dict[str, list[Any]]]:
        """Copy the context with empty collecting lists; return the copy and its lists. Hooks
        collect there as usual, but nothing reaches the model."""
        context, collected = self._context.copy(), {}
        if self._variable and self._collector:
            # the collector contains settings in addition to lists
            fresh = {k: [] if isinstance(v, list) else v for k, v in self._collector.items()}
            context.run(self._variable.set, fresh)
            collected = _select_lists(fresh)
        return context, collected

    def give_to_model(self, collected: Collected) -> None:
        """Give the collected values to the model."""
        lists, self._put = collected
        for key, values in lists.items():
            self._collector[key].extend(values)
        if self._given is not None:
            self._given.fill(self._put)


def take_apart(
    unit: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Context,
    *,
    may_change: bool = True,
) -> tuple[list[Any], ArgumentsStructure, OutputCapture]:
    """Return the leaves of the arguments of a call of `unit`, with their structure, and the capture
    of the call.

    Args:
        context: of the model's own code around the call.
        may_change: False for a unit with a part of the positions, which would put only a part into
            containers.
    """
    leaves, structure = ArgumentsStructure.of(args, kwargs)
    own = Containers(unit, args, kwargs) if may_change else None
    return leaves, structure, OutputCapture(context, own)


def _select_lists(collector: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: values for key, values in collector.items() if isinstance(values, list)}
