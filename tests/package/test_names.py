"""Public names and calls do not change by accident; `make golden` writes them anew."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from pydantic import BaseModel

import gpumix

OTHERS = ("gpumix.integrations.transformers", "gpumix.integrations.trl")


def test_names_and_signatures(golden):
    golden("names", {name: surface(getattr(gpumix, name)) for name in gpumix.__all__}, rel=0)


@pytest.mark.parametrize("module", OTHERS)
def test_names_of_integrations(module, golden):
    """What their classes have beside is the other library's."""
    there = import_module(module)
    found = {name: str(inspect.signature(getattr(there, name))) for name in there.__all__}
    golden(module, found, rel=0)


def test_all_public_names_are_there_and_nothing_else_is_promised():
    assert sorted(gpumix.__all__) == gpumix.__all__
    assert set(gpumix.__all__) <= set(dir(gpumix))


def surface(thing: Any) -> Any:
    """A function's signature; of a class also those of its members."""
    if not inspect.isclass(thing):
        return str(inspect.signature(thing))
    return {"()": called(thing), **dict(sorted(members(thing)))}


def called(kind: type) -> Any:
    """How one is made; of a value its fields."""
    if not issubclass(kind, BaseModel):
        return str(inspect.signature(kind))
    fields = kind.model_fields
    return {n: "required" if f.is_required() else "default" for n, f in sorted(fields.items())}


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Public ones that this package defines."""
    for base in kind.__mro__:
        if not base.__module__.startswith("gpumix."):
            continue
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            if isinstance(value, property):
                yield name, "property"
            elif isinstance(value, classmethod) or inspect.isfunction(value):
                yield name, str(inspect.signature(getattr(kind, name)))
