"""Keys of a job that errors tell a reader to set are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel

from gpumix.schema.job.job import Job

PACKAGE = Path(__file__).parents[2] / "src" / "gpumix"


def fields_of(kind: Any) -> dict[str, Any]:
    """What each key of a section holds; nothing of what is no section."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {}
    return {name: _without_none(field.annotation) for name, field in kind.model_fields.items()}


def _without_none(kind: Any) -> Any:
    """What a section is that may be left out."""
    kinds = [one for one in get_args(kind) if one is not NoneType]
    return kinds[0] if len(kinds) == 1 and NoneType in get_args(kind) else kind


SECTIONS = "|".join(name for name, kind in fields_of(Job).items() if fields_of(kind))
AS_KEYS = (
    re.compile(r"--set (?!key=|KEY=)(\w[\w.]+)="),
    re.compile(rf"(?<![\w.'])((?:{SECTIONS})\.(?!json)[\w.]*\w)(?![\w(])"),
    re.compile(rf"(?<!\w)((?:{SECTIONS}): \{{\w+)"),
    re.compile(r"`([\w.]+)` in the job"),
)
# Files without it are not parsed: their texts name no key.
MAY_NAME = re.compile(
    rf"(?m)--set|` in |^[^#\n]*[\"'].*\b(?:{SECTIONS})(?:\.\w|: \{{)|=\s*f?\"\"\""
)


def fixes() -> Iterator[tuple[str, str]]:
    """(where, all that is written in it) of each `fix`, and of the constants that serve as one."""
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if MAY_NAME.search(text) else ():
            as_fix = isinstance(node, ast.keyword) and node.arg == "fix"
            if as_fix or isinstance(node, ast.Assign):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                written = " ".join(part for part in parts if isinstance(part, str))
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", written


def named() -> dict[str, list[str]]:
    """Keys that fixes name, and where."""
    found: dict[str, list[str]] = {}
    for where, written in fixes():
        for pattern in AS_KEYS:
            for key in pattern.findall(written):
                found.setdefault(key.replace(": {", "."), []).append(where)
    return found


def is_key(key: str) -> bool:
    kind: Any = Job
    for part in key.split("."):
        if part not in fields_of(kind):
            return False
        kind = fields_of(kind)[part]
    return True


def test_keys_that_fixes_name_can_be_set():
    assert not is_key("data.timeout") and not is_key("patience") and not is_key("output_dir.path")
    found = named()
    assert {
        "data.packing",
        "data.num_workers",
        "optimizer.lr",
        "output_dir",
        "advanced.timeout",
        "advanced.efficiency.attention",
    } <= found.keys()
    assert {key: where for key, where in found.items() if not is_key(key)} == {}
