"""Public names and calls do not change by accident; `make golden` writes them anew."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import gpumix

sys.path.append(str(Path(__file__).parents[2] / "docs"))

from parts import integrations

BY_SOURCE = ("gpumix.integrations.lightning", "gpumix.integrations.ray")
OTHERS = ("gpumix.integrations.transformers", "gpumix.integrations.trl")


def test_names_and_signatures(golden):
    golden("names", {name: surface(getattr(gpumix, name)) for name in gpumix.__all__}, rel=0)


@pytest.mark.parametrize("module", OTHERS)
def test_names_of_integrations(module, golden):
    """What their classes have beside is the other library's."""
    there = import_module(module)
    found = {name: str(inspect.signature(getattr(there, name))) for name in there.__all__}
    golden(module, found, rel=0)


@pytest.mark.parametrize("module", BY_SOURCE)
def test_names_of_integrations_by_their_source(module, golden):
    """Their libraries need not be there."""
    golden(module, {one.name: one.signature() for one in integrations.names(module)}, rel=0)


@pytest.mark.parametrize("module", OTHERS)
def test_sources_say_what_there_is(module):
    """How names are read is right where it can be compared."""
    there = import_module(module)
    for one in integrations.names(module):
        told = re.sub(r"[\s']+", "", one.signature().removeprefix(one.name)).replace(",)", ")")
        real = re.sub(r"[\s']+", "", str(inspect.signature(getattr(there, one.name))))
        passed_on = "(*args:Any,**kwargs:Any)"
        assert real.removesuffix("->None") in (told, passed_on)


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
            if isinstance(value, property | cached_property):
                yield name, "property"
            elif isinstance(value, classmethod) or inspect.isfunction(value):
                yield name, str(inspect.signature(getattr(kind, name)))
