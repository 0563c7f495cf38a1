"""Lists, dicts and caches given to a unit: values put in by the unit are further outputs.

Blocks share keys and values of attention, or collect losses, through a container that the model
gives to each block. The engine gives a unit copies, so that a recompute finds the original
contents, and then puts the unit's new values into the model's own containers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils._pytree import tree_flatten, tree_is_leaf

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.model.unit_values import PLAIN_TYPES, is_attribute_container

# For each changed container, by index: items by key or place, and appended items.
ContainerChanges = dict[int, tuple[dict[Any, Any], list[Any]]]


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
    return all(
        type(value) in PLAIN_TYPES or (type(value) is tuple and _are_plain(value))
        for value in values
    )


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
