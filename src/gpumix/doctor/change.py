"""Changes of a job: values by the path to them, as in `--set`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gpumix.spec.base import Value
from gpumix.spec.job import Job

Changes = Mapping[str, Any]
"""Values by their keys, with dots between."""


def overrides(changes: Changes) -> list[str]:
    """The same as `--set` has them."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def in_words(changes: Changes) -> str:
    """As a reader would write them; a default is left out."""
    return ", ".join(
        f"no `{key}`" if value == default_of(key) else f"`{key}: {json.dumps(value)}`"
        for key, value in changes.items()
    )


def default_of(key: str) -> Any:
    """Of a key of a job, as JSON has it."""
    *path, last = key.split(".")
    spec: type[Value] = Job
    for part in path:
        inner = spec.model_fields[part].annotation
        assert isinstance(inner, type) and issubclass(inner, Value), key
        spec = inner
    value = spec.model_fields[last].get_default(call_default_factory=True)
    return json.loads(json.dumps(value, default=str))


def write_tuned(job: Path, tuned: Path, changes: Changes) -> None:
    """The job file with the changes made, as another file. Comments are not kept."""
    content = yaml.safe_load(job.read_text(encoding="utf-8"))
    for key, value in changes.items():
        _change(content, key.split("."), value, key)
    head = f"# {job.name} as gpumix doctor would have it\n"
    tuned.write_text(head + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _change(content: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    first, *rest = path
    if rest:
        inner = content.setdefault(first, {})
        _change(inner, rest, value, key)
        if not inner:
            del content[first]
    elif value == default_of(key):
        content.pop(first, None)
    else:
        content[first] = value
