"""Changes of a job: values by dotted key, as in `--set`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpumix.doctor.layout import set_yaml_value
from gpumix.schema.errors import InputError
from gpumix.schema.files import read_bytes, replace_text
from gpumix.schema.job.job import Job
from gpumix.schema.reading.overrides import parse_key
from gpumix.schema.reading.yaml_locations import YamlSource, parse_yaml
from gpumix.schema.value import Value

Changes = Mapping[str, Any]
"""Values by dotted key."""


def format_overrides(changes: Changes) -> list[str]:
    """Return the changes as `--set` arguments."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def merge_overrides(given: Sequence[str], changes: Changes) -> list[str]:
    """Return the `--set` arguments for a job file containing the changes: the arguments `given`,
    without replaced keys, plus changes overridden by a remaining argument for a parent key."""
    replaced = tuple(f"{key}." for key in changes)
    kept = [one for one in given if not f"{parse_key(one)}.".startswith(replaced)]
    above = tuple(f"{parse_key(one)}." for one in kept)
    return kept + format_overrides({k: v for k, v in changes.items() if k.startswith(above)})


def describe_changes(changes: Changes) -> str:
    """Format changes for a reader; a default value reads as an absent key."""
    return ", ".join(
        f"no `{key}`" if value == get_default(key) else f"`{key}: {json.dumps(value)}`"
        for key, value in changes.items()
    )


def get_default(key: str) -> Any:
    """Return the default of a job key, as JSON value."""
    *path, last = key.split(".")
    spec: type[Value] = Job
    for part in path:
        inner = spec.model_fields[part].annotation
        assert isinstance(inner, type) and issubclass(inner, Value), key
        spec = inner
    value = spec.model_fields[last].get_default(call_default_factory=True)
    return json.loads(json.dumps(value, default=str))


def write_tuned(job: Path, tuned: Path, changes: Changes, notes: Sequence[str] = ()) -> None:
    """Write a changed copy of a job file, starting with the notes. Comments and order are kept,
    unless the layout of a value prevents an edit in place.

    Raises:
        MachineError: writing fails.
    """
    text = read_bytes(job).decode("utf-8-sig")
    content = _parse_job_text(text)
    made = {k: v for k, v in changes.items() if v != get_default(k) or _has_key(content, k)}
    for key, value in made.items():
        _set_key(content, key.split("."), value)
    try:
        for key, value in made.items():
            text = set_yaml_value(text, key.split("."), value)
        kept = _parse_job_text(text) == content
    except (ValueError, yaml.YAMLError, InputError):
        kept = False
    head = "".join(f"# {line}\n" for line in (f"{job.name} as gpumix doctor would have it", *notes))
    body = text if kept else yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    by_hand = " ".join(f"--set {one}" for one in format_overrides(changes))
    replace_text(
        tuned,
        head + body,
        cannot="cannot write the job with its changes",
        fix=f"make them yourself: {by_hand}",
    )


def _parse_job_text(text: str) -> Any:
    """Parse a job's text into values; duplicate keys are an error."""
    tree = parse_yaml(text, YamlSource("the job", Path()))
    assert tree is not None, "it was read as a job"
    return tree.value


def _has_key(content: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(content, dict) or part not in content:
            return False
        content = content[part]
    return True


def _set_key(content: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        content = content.setdefault(part, {})
    content[path[-1]] = value
