"""Docstrings and comments name modules of the package, and values in them, as they are today."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import gpumix

PACKAGE = Path(gpumix.__file__).parent
PARTS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
DOTTED = re.compile(r"`(?:gpumix\.)?([a-z_]+(?:\.\w+)+)`")
FILE = re.compile(r"`([a-z_]+/[a-z_0-9/]+\.py)`")


def is_there(dotted: str) -> bool:
    """Whether a package, a module, or a value in one has this name."""
    place, parts = PACKAGE, dotted.split(".")
    for number, part in enumerate(parts):
        module = place / f"{part}.py"
        if (place / part).is_dir():
            place /= part
        elif module.exists():
            values = parts[number + 1 :]
            return not values or re.search(rf"\b{values[0]}\b", module.read_text()) is not None
        else:
            return part in (place / "__init__.py").read_text()
    return True


def wrong_names() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        dotted = (name for name in DOTTED.findall(text) if name.split(".")[0] in PARTS)
        files = (name for name in FILE.findall(text) if name.split("/")[0] in PARTS)
        found = [name for name in dotted if not is_there(name)]
        found += [name for name in files if not (PACKAGE / name).exists()]
        yield from (f"{path.relative_to(PACKAGE)}: {name}" for name in found)


def test_names_are_of_modules_that_are_there():
    assert is_there("engine.unit.unit_call.UnitBoundary")
    assert not is_there("engine.unit.unit_call.NoSuchName")
    assert list(wrong_names()) == []
