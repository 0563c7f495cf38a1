"""All public names with their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from pydantic import BaseModel

import gpumix

WIDTH = 88
MADE_BY_OTHERS = {"Engine"}  # nobody calls its constructor
OF_ALL_DOCUMENTS = {"kind", "schema_version"}
TITLES = ("Args:", "Returns:", "Raises:", "Attributes:")


def sections() -> str:
    """All sections of the page: functions first, then what they take and return."""
    names = sorted(gpumix.__all__, key=lambda n: (inspect.isclass(getattr(gpumix, n)), n.lower()))
    return "\n\n".join(_section(name, getattr(gpumix, name)) for name in names)


def _section(name: str, thing: Any) -> str:
    parts = [f"## gpumix.{name}"]
    if name not in MADE_BY_OTHERS:
        shown = _constructor(name, thing) if _is_value(thing) else _signature(name, thing)
        parts.append(f"```python\n{shown}\n```")
    parts.append(docstring(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        parts += list(_members(thing))
    return "\n\n".join(part for part in parts if part)


# -- signatures ------------------------------------------------------------------------------------


def _signature(name: str, thing: Any) -> str:
    """As it is called: without `self`, annotations as they are written."""
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    returned = "" if inspect.isclass(thing) else f" -> {signature.return_annotation}"
    return called(name, list(_parameters(parameters)), returned)


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        default = parameter.default
        shown = getattr(default, "__name__", None) or repr(default)
        tail = "" if default is parameter.empty else f" = {shown}"
        yield f"{parameter.name}: {parameter.annotation}{tail}"


def _constructor(name: str, value: type[BaseModel]) -> str:
    """A value's fields with their types as they are written."""
    written: dict[str, str] = {}
    for base in reversed(value.__mro__):
        written |= inspect.get_annotations(base) if issubclass(base, BaseModel) else {}
    fields = {k: f for k, f in value.model_fields.items() if k not in OF_ALL_DOCUMENTS}
    told = [
        f"{key}: {written[key]}"
        + ("" if f.is_required() else f" = {f.get_default(call_default_factory=True)!r}")
        for key, f in fields.items()
    ]
    return called(name, ["*", *told], "")


def called(name: str, parts: list[str], returned: str) -> str:
    flat = f"{name}({', '.join(parts)}){returned}"
    if len(flat) <= WIDTH:
        return flat
    return f"{name}(\n{''.join(f'    {part},{chr(10)}' for part in parts)}){returned}"


# -- what a class has ------------------------------------------------------------------------------


def _members(kind: type) -> Iterator[str]:
    """Methods and properties that `kind` and its bases in this package define."""
    own = [b for b in kind.__mro__ if b.__module__.startswith("gpumix.")]
    found: dict[str, Any] = {}  # a class's own first
    for base in own:
        found = {**found, **{k: v for k, v in vars(base).items() if k not in found}}
    rows = []
    for name, value in found.items():
        if name.startswith("_"):
            continue
        if isinstance(value, property | cached_property):
            read = value.fget if isinstance(value, property) else value.func
            rows.append((f"{name}: {inspect.signature(read).return_annotation}", read))
        elif isinstance(value, classmethod) or inspect.isfunction(value):
            rows.append((" ".join(_signature(name, getattr(kind, name)).split()), value))
    if rows:
        yield "Methods and properties:"
        yield "\n".join(f"* `{shown}`  \n  {_first(value)}".rstrip() for shown, value in rows)


def _first(thing: Any) -> str:
    """The first paragraph of a docstring, as one line."""
    text = inspect.getdoc(inspect.unwrap(thing)) or ""
    return " ".join(text.split("\n\n")[0].split())


# -- docstrings ------------------------------------------------------------------------------------


def docstring(text: str) -> str:
    """A docstring as Markdown: its sections become lists."""
    return "\n\n".join(_paragraph(block) for block in text.split("\n\n"))


def _paragraph(block: str) -> str:
    title, *lines = block.splitlines()
    if title not in TITLES:
        return block
    return f"{title}\n\n" + "\n".join(_items(lines))


def _items(lines: Iterable[str]) -> Iterator[str]:
    """One item per entry of a section; lines that are indented deeper go on with it."""
    for line in lines:
        entry = re.match(r"    (\w[\w, ]*): (.*)", line)
        if entry:
            yield f"* `{entry[1]}`: {entry[2]}"
        else:
            yield f"  {line.strip()}"


def _is_value(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseModel)
