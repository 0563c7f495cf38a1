"""Temporary replacement of attributes of modules, classes and objects in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def replace_attributes(owner: Any, /, **values: Any) -> Iterator[None]:
    """Replace attributes of `owner` inside the context, inherited ones included."""
    before = {name: vars(owner).get(name, _INHERITED) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _INHERITED:
                setattr(owner, name, value)
            elif name in vars(owner):  # others may have removed it
                delattr(owner, name)
