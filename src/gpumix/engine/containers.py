"""Lists, dicts and caches that a unit is given: what it puts there is a further output of it.

Blocks share keys and values of attention, or collect losses, by a container that the model gives to
each. The engine gives a unit copies, so that a recompute finds them as they were, and puts into the
model's own what the unit has put into the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils._pytree import tree_flatten, tree_is_leaf

from gpumix.engine.coroutine import ModelError
from gpumix.engine.values import PLAIN_TYPES, is_open

# Of each container that was changed, by its number: items by their keys or places, and what was
# appended.
Put = dict[int, tuple[dict[Any, Any], list[Any]]]


class Containers:
    """The lists, dicts and caches among a call's arguments, with what they hold now.

    Args:
        unit: the called one.
    """

    def __init__(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._unit = unit
        self._all = [*_containers(args), *(c for v in kwargs.values() for c in _containers(v))]
        self._before = [_items(container) for container in self._all]
        given = [*args, *kwargs.values()]
        self._others = [(one, *tree_flatten(one)) for value in given for one in _others(value)]

    def put(self, *, allowed: bool = True) -> Put:
        """What they hold that they did not before; only if that is allowed."""
        for other, leaves, structure in self._others:
            found, now = tree_flatten(other)
            if structure != now or any(a is not b for a, b in zip(leaves, found)):
                self._refuse(f"changes a {type(other).__name__}, not")
        return self._new(allowed=allowed)

    def _new(self, *, allowed: bool) -> Put:
        found: Put = {}
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

    def fill(self, put: Put) -> None:
        """Put there what was put into copies of them."""
        for number, (items, appended) in put.items():
            container = self._all[number]
            if sum(other is container for other in self._all) > 1:  # of which there were two copies
                self._refuse("is given twice, and changes,")
            held = vars(container) if is_open(container) else container
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


def fill(own: Containers | None, copies: Containers) -> None:
    """Put into the model's own containers what was put into copies; None: nothing may be."""
    put = copies.put(allowed=own is not None)
    if own is not None:
        own.fill(put)


def _containers(value: Any) -> Iterator[Any]:
    """Those in a value, itself first."""
    if isinstance(value, list | dict) or is_open(value):
        yield value
    for item in _inside(value):
        yield from _containers(item)


def _items(container: Any) -> dict[Any, Any]:
    """By key, place or attribute."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container.items() if isinstance(container, dict) else vars(container))


def _inside(value: Any) -> Iterable[Any]:
    """The values that one holds, as far as it may be changed item by item."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if is_open(value) else ()


def _others(value: Any) -> Iterator[Any]:
    """Those objects in a value that hold others in another way."""
    for item in _inside(value):
        yield from _others(item)
    plain = isinstance(value, tuple | list | dict) or type(value) in PLAIN_TYPES
    if not (plain or is_open(value) or tree_is_leaf(value)):
        yield value
