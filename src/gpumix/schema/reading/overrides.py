"""Replacement of single values of a job from the command line with `--set key=value`.

The key is dotted, the value is YAML. The job's own validation checks that the key exists and
reports the argument as the location. Used by `schema.reading.read`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from gpumix.schema.errors import InputError
from gpumix.schema.reading.yaml_locations import (
    UNFIT,
    Keys,
    Tree,
    YamlLocation,
    YamlSource,
    parse_yaml,
    show_keys,
    show_value,
)


def name_job(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return a job and its replaced keys, quoted as arguments of another command."""
    return shlex.join([str(path), *(word for one in overrides for word in ("--set", one))])


def parse_key(argument: str) -> str:
    """Return the dotted key of an argument, without spaces around its parts."""
    return ".".join(part.strip() for part in argument.partition("=")[0].split("."))


def apply_override(tree: Tree, argument: str) -> Tree:
    """Return `tree` with one value set, creating missing mappings on the path.

    Raises:
        InputError: the argument is not key=value, its value is not YAML, or its key leads through a
            value that is not a mapping.
    """
    source = YamlSource(f"--set {argument}", Path.cwd())
    key, equals, text = argument.partition("=")
    keys: Keys = tuple(parse_key(argument).split("."))
    if not equals or not all(keys) or UNFIT.search(key):
        raise InputError(
            f"'{argument}' is not of the form key=value",
            code="override-not-key-value",
            where=source.name,
            fix="write a dotted key, '=' and a value, such as --set optimizer.lr=1e-4",
        )
    new = parse_yaml(text, source, lines=False) or Tree(None, {(): YamlLocation(source)})
    places = {k: p for k, p in tree.places.items() if k[: len(keys)] != keys}
    for depth in range(1, len(keys)):
        places.setdefault(keys[:depth], YamlLocation(source))
    places |= {(*keys, *k): p for k, p in new.places.items()}
    return Tree(_set_value(tree.value, keys, 0, new.value, source), places)


def _set_value(holder: object, keys: Keys, depth: int, value: object, source: YamlSource) -> object:
    """Return `holder`, a mapping at keys[:depth], with `value` set at `keys`."""
    if depth == len(keys):
        return value
    if holder is not None and not isinstance(holder, dict):
        raise InputError(
            f"'{show_keys(keys[:depth])}' is {show_value(holder)}, it has no keys",
            code="override-of-scalar",
            where=source.name,
            fix=f"set all of it: --set '{show_keys(keys[:depth])}=...'",
        )
    old: dict[str | int, object] = holder or {}
    return {**old, keys[depth]: _set_value(old.get(keys[depth]), keys, depth + 1, value, source)}
