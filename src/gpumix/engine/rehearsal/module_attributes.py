"""Plain attributes of modules, which are no parameters or buffers: counters, lists, running sums.

A rehearsal computes some samples several times and must leave no trace in attributes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MAX_COPIED_ELEMENTS = (
    1000  # elements; longer containers keep only the length, longer tensors nothing
)
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
_LISTS = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_LISTS, *_MAPPINGS, set)
_RESTORED_TYPES = (bool, int, float, Tensor, *_CONTAINERS)


def get_numeric_attributes(model: nn.Module) -> dict[tuple[str, str], float]:
    """Return numeric attributes of modules, such as counters, by module name and attribute name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (bool, int, float) and name not in TORCH_ATTRIBUTES
    }


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Restore numbers, containers and tensors in module attributes on exit. New attributes that
    hide a number of the class are deleted."""
    before = get_numeric_attributes(model)
    undo: list[Callable[[], object]] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in TORCH_ATTRIBUTES and type(value) in _RESTORED_TYPES:
                undo += [partial(setattr, module, name, value), *_iterate_restorers(value, seen)]
    try:
        yield
    finally:
        for path, name in get_numeric_attributes(model).keys() - before.keys():
            module = model.get_submodule(path)
            if hasattr(type(module), name):
                delattr(module, name)
        for put_back in undo:
            put_back()


def _iterate_restorers(value: Any, seen: set[int]) -> Iterator[Callable[[], object]]:
    """Yield functions that restore the contents of a value.

    Args:
        seen: `id` of each visited value, because a container may contain itself.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if type(value) is Tensor:
        # Inference tensors cannot be written to outside of inference mode.
        if (
            value.numel() <= MAX_COPIED_ELEMENTS
            and value.device.type != "meta"
            and not value.is_inference()
        ):
            yield partial(_restore, value, value.detach().clone(), value._version)
    elif type(value) in _CONTAINERS and len(value) <= MAX_COPIED_ELEMENTS:
        yield partial(_refill, value, value.copy())
        for inner in list(value.values()) if type(value) in _MAPPINGS else list(value):
            yield from _iterate_restorers(inner, seen)
    elif type(value) in (*_LISTS, *_MAPPINGS):
        yield partial(_shorten, value, len(value))


def _restore(tensor: Tensor, values: Tensor, version: int) -> None:
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(values)


def _shorten(container: Any, length: int) -> None:
    """Remove appended items."""
    while len(container) > length:
        container.popitem() if type(container) in _MAPPINGS else container.pop()


def _refill(container: Any, contents: Any) -> None:
    if len(container) == len(contents) and all(
        one is other for one, other in zip(_identities(container), _identities(contents))
    ):
        return
    container.clear()
    if type(container) in _LISTS:
        container.extend(contents)
    else:
        container.update(contents)


def _identities(container: Any) -> Iterator[Any]:
    if type(container) in _MAPPINGS:
        for key, value in container.items():
            yield key
            yield value
    else:
        yield from container
