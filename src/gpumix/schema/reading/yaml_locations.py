"""YAML text as plain values, with the location of every key, so that errors can name the line.

PyYAML's node tree (`compose`) has lines and columns, and never runs code. Used by
`schema.reading.read`. The values are those of JSON: mappings with text keys, lists, text, numbers,
booleans.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpumix.schema.errors import InputError, make_missing_file_error
from gpumix.schema.file_errors import explain_unreadable
from gpumix.schema.files import open_for_reading

Keys = tuple[str | int, ...]
"""Path from the top of a file to a value: mapping keys and list indices."""

MAX_BYTES = 10_000_000
MAX_DEPTH = 50
MAX_VALUES = 100_000

_TAG = "tag:yaml.org,2002:"
_PLAIN = {"bool", "null", "int", "float"}
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
UNFIT = re.compile("[\0\ud800-\udfff]")
"""Characters not allowed in file names and JSON."""

# Characters with a special meaning in YAML at the start of a value.
BEGINS_ODDLY = re.compile(r"(?:^|[\s:,\[{=])[*&!%@`]")
NEEDS_QUOTES = """put a value that begins with one of * & ! % @ ` in quotes: '"*.md"'"""


@dataclass(frozen=True)
class YamlSource:
    """A file, or a `--set` argument; relative paths in the source start at `folder`."""

    name: str
    folder: Path


@dataclass(frozen=True)
class YamlLocation:
    """The location of a value; `line` counts from 1 and is 0 in a `--set` argument."""

    source: YamlSource
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}" if self.line else self.source.name


@dataclass(frozen=True)
class Tree:
    """Plain values, with the location of every key and list item; the keys of the top are ()."""

    value: object
    places: dict[Keys, YamlLocation]

    def place(self, keys: Keys) -> YamlLocation:
        """Return the location of `keys`; for a missing value, of the nearest existing parent."""
        while keys not in self.places:
            keys = keys[:-1]
        return self.places[keys]

    def locate(self, key: str) -> str:
        """Return a dotted key after its location; anything else unchanged."""
        keys: Keys = tuple(key.split("."))
        return f"{self.place(keys)}: {key}" if keys[:1] in self.places else key

    def overrides(self, keys: Keys) -> Iterator[YamlLocation]:
        """Yield the locations of `--set` values below `keys`."""
        for below, place in self.places.items():
            if not place.line and len(below) > len(keys) and below[: len(keys)] == keys:
                yield place


def load_yaml(path: Path, what: str) -> Tree:
    """Read the YAML file at `path`; errors call the file a `what` file.

    Raises:
        InputError: the file is missing, a folder, not UTF-8, empty or not YAML.
    """
    try:
        with open_for_reading(path) as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except FileNotFoundError as error:
        raise make_missing_file_error(what, path) from error
    except IsADirectoryError as error:
        inside = path / f"{what}.yaml"
        raise InputError(
            f"this is a folder, not a {what} file",
            code="file-is-folder",
            where=str(path),
            fix=f"give {inside}" if inside.exists() else "give a file",
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the {what} file is not UTF-8 text",
            code="file-not-utf8",
            where=str(path),
            why=str(error),
            fix="save it as UTF-8, or give another file",
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the {what} file",
            code="file-unreadable",
            where=str(path),
            why=explain_unreadable(error),
            fix="give a file that can be read, /dev/stdin or <(command)",
        ) from error
    if len(data) > MAX_BYTES:
        raise InputError(
            f"a {what} file may not be longer than 10 MB",
            code="file-too-long",
            where=str(path),
            fix=f"give the {what} file; data belongs into files of its own",
        )
    tree = parse_yaml(text, YamlSource(str(path), path.parent.absolute()))
    if tree is None:
        fix = f"write the {what} into it, or give another file"
        raise InputError(f"the {what} file is empty", code="file-empty", where=str(path), fix=fix)
    return tree


def parse_yaml(text: str, source: YamlSource, *, lines: bool = True) -> Tree | None:
    """Parse `text`; return None if empty. Without `lines` all values are located at `source`
    itself.

    Raises:
        InputError: not YAML, a repeated key, an unsupported tag, or too deep or too many values.
    """
    reader = _NodeConverter(source, lines)
    node = _compose(text, reader)
    if node is None:
        return None
    reader.places[()] = reader.place(node.start_mark)
    return Tree(reader.value(node, ()), reader.places)


class _TooManyValuesError(yaml.MarkedYAMLError):
    """More values than allowed."""


class _Loader(yaml.SafeLoader):
    """Loader with a limit on nodes: each takes a kilobyte, and time."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > 2 * MAX_VALUES:  # keys are nodes too
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _TooManyValuesError(None, None, f"there are more than {MAX_VALUES} values", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _compose(text: str, reader: _NodeConverter) -> yaml.Node | None:
    """Return PyYAML's node tree, translating errors."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except _TooManyValuesError as error:
        raise InputError(
            str(error.problem), code="yaml-too-many-values", where=reader.exact(error.problem_mark)
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = reader.exact(mark)
        what = f"this is not YAML: {error.problem or error.context}"
        lines = text.splitlines()[mark.line : mark.line + 1] if mark is not None else [text]
        fix = NEEDS_QUOTES if any(map(BEGINS_ODDLY.search, lines)) else f"correct {where}"
        raise InputError(
            what, code="yaml-invalid", where=where, why=error.context or "", fix=fix
        ) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        where = f"{reader.source.name}:{line}:{column}" if reader.lines else reader.source.name
        what = f"this is not YAML: the character {chr(error.character)!r} may not stand here"
        raise InputError(
            what, code="yaml-invalid", where=where, fix="remove it, or write it as an escape"
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InputError(
            "this is not YAML", code="yaml-invalid", where=reader.source.name, why=str(error)
        ) from error
    except RecursionError as error:
        raise InputError(
            "this is nested too deep",
            code="yaml-too-deep",
            where=reader.source.name,
            fix="nest fewer levels",
        ) from error


class _NodeConverter:
    """Converts nodes of one text to values and records the location of each."""

    def __init__(self, source: YamlSource, lines: bool) -> None:
        self.source = source
        self.lines = lines
        self.places: dict[Keys, YamlLocation] = {}
        self.scalars = yaml.constructor.SafeConstructor()

    def place(self, mark: yaml.Mark) -> YamlLocation:
        return (
            YamlLocation(self.source, mark.line + 1, mark.column)
            if self.lines
            else YamlLocation(self.source)
        )

    def exact(self, mark: yaml.Mark | None) -> str:
        """Return `file:line:column`, for syntax errors."""
        if mark is None or not self.lines:
            return self.source.name
        return f"{self.source.name}:{mark.line + 1}:{mark.column + 1}"

    def fail(self, what: str, node: yaml.Node, fix: str = "", *, code: str) -> InputError:
        return InputError(what, code=code, where=self.exact(node.start_mark), fix=fix)

    def value(self, node: yaml.Node, keys: Keys) -> object:
        """Return the value of `node`. Aliases repeat values, hence the two limits."""
        if len(keys) > MAX_DEPTH:
            raise self.fail(
                f"this is nested deeper than {MAX_DEPTH} levels", node, code="yaml-too-deep"
            )
        if len(self.places) > MAX_VALUES:
            raise self.fail(
                f"there are more than {MAX_VALUES} values", node, code="yaml-too-many-values"
            )
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self.mapping(node, keys)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return self.sequence(node, keys)
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        raise self.fail(
            f"the tag '{node.tag}' is not read", node, "leave the tag out", code="yaml-tag-unknown"
        )

    def sequence(self, node: yaml.SequenceNode, keys: Keys) -> list[object]:
        values = []
        for index, item in enumerate(node.value):
            self.places[*keys, index] = self.place(item.start_mark)
            values.append(self.value(item, (*keys, index)))
        return values

    def mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, item in node.value:
            name = self.key(key)
            if name in values:
                first = self.places[*keys, name]
                raise self.fail(
                    f"key '{show_keys((*keys, name))}' is given twice, at {first}",
                    key,
                    code="key-given-twice",
                )
            self.places[*keys, name] = self.place(key.start_mark)
            values[name] = self.value(item, (*keys, name))
        return values

    def key(self, node: yaml.Node) -> str:
        """Return the text of a key as written, so that `on` and `1` are names and not values."""
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail("a key must be text", node, code="yaml-key-not-text")
        if node.tag == f"{_TAG}merge":
            raise self.fail(
                "merge keys '<<' are not read", node, "write the keys out", code="yaml-merge-key"
            )
        return self.text(node)

    def text(self, node: yaml.ScalarNode) -> str:
        if UNFIT.search(node.value):
            raise self.fail(
                f"{json.dumps(node.value)} holds a character that is no text",
                node,
                code="yaml-character-invalid",
            )
        return str(node.value)

    def scalar(self, node: yaml.ScalarNode) -> object:
        """Return the text, number, boolean or null of a scalar.

        YAML 1.1 reads `3e-4` as text because the point is missing; everybody else reads a number.
        """
        tag = node.tag.removeprefix(_TAG)
        if tag in _PLAIN:
            return self.plain(node)
        if tag not in {"str", "timestamp", "merge", "value"}:
            raise self.fail(
                f"the tag '{node.tag}' is not read",
                node,
                "leave the tag out",
                code="yaml-tag-unknown",
            )
        if tag == "str" and node.style is None and _EXPONENT.match(node.value):
            return float(node.value)
        return self.text(node)

    def plain(self, node: yaml.ScalarNode) -> object:
        """Convert a plain scalar; floats may be infinite, but integers may not be too long."""
        try:
            value: object = self.scalars.construct_object(node)
            str(value)
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise self.fail(
                f"'{node.value[:40]}' is not a value", node, code="yaml-value-invalid"
            ) from error
        return value


def show_keys(keys: Keys) -> str:
    """Format `keys` for users: 'cluster.devices[1].host'."""
    shown = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys)
    return shown.removeprefix(".")


def show_value(value: object) -> str:
    """Format `value` for error messages, shortened to 60 characters."""
    if value is None or value in ([], {}):
        return "empty"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    shown = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
