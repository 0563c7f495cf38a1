"""Base classes of all values: frozen, strict about keys, one JSON file each.

A value passed between commands is a `Document`. It names its kind and schema version, so passing a
plan where a profile is expected raises a clear error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from gpumix.schema.errors import InputError
from gpumix.schema.file_errors import explain_unreadable
from gpumix.schema.files import read_text, replace_text

# Keys that identify the items of a list in documents.
_NAMES = ("name", "id", "device", "device_class", "operation")


# Content of a file whose bytes had not reached the disk when the machine stopped.
_NOTHING = " \t\r\n\0"
# Start of a document as written by `Document.save`.
_BEGINS = re.compile(
    r'\{\s*"kind": "(?P<kind>[a-z -]+)"(?:,\s*"schema_version": (?P<schema>\d+),)?'
)


class Value(BaseModel):
    """A frozen value. Unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings"
    )

    def __copy__(self) -> Self:
        """Return a copy with only the fields. `model_copy` may replace fields, which would leave
        cached properties stale."""
        copied = super().__copy__()
        vars(copied).clear()
        vars(copied).update(self._fields_only())
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state to pickle: the fields without cached properties."""
        return super().__getstate__() | {"__dict__": self._fields_only()}

    def _fields_only(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in type(self).model_fields if name in vars(self)}

    def digest(self) -> str:
        """Return twelve hex digits that change when any field changes."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Document(Value):
    """A value stored in a JSON file."""

    KIND: ClassVar[str]  # the default of `kind`
    SCHEMA: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = ""  # the command, if not a verb named like the kind

    kind: str
    schema_version: int = 1

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.KIND = cls.model_fields["kind"].default

    @classmethod
    def load(cls, path: Path, *, fix: str = "") -> Self:
        """Read the document from `path`.

        Args:
            fix: the fix reported in errors; by default, the command that makes the document.

        Raises:
            InputError: the file is missing, unreadable, not JSON, repeats a key, or has another
                kind or schema.
        """
        made_by = cls.MADE_BY or f"gpumix {cls.KIND} JOB.yaml --output {cls.KIND}.json"
        fix = fix or f"make one with `{made_by}`"
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            inside = path / f"{cls.KIND}.json"
            raise InputError(
                f"cannot read the {cls.KIND}",
                code="document-unreadable",
                where=str(path),
                why=explain_unreadable(error),
                fix=f"give {inside}" if inside.exists() else fix,
            ) from error
        _check_kind(cls, text, path, fix)
        try:
            return cls.model_validate_json(text, strict=True)  # "4" and 4.0 are not accepted as 4
        except ValidationError as error:
            raise _make_invalid_error(cls, text, error, path, fix) from error

    def save(self, path: Path) -> None:
        """Write the document to `path` atomically.

        Raises:
            InputError: the existing file must not be replaced; see `check_replaceable`.
            MachineError: the file cannot be written.
        """
        self.check_replaceable(path)
        replace_text(
            path,
            self.model_dump_json(indent=1) + "\n",
            cannot=f"cannot write the {self.KIND}",
        )

    @classmethod
    def check_replaceable(cls, path: Path) -> None:
        """Refuse to overwrite anything except a replaceable document of this kind.

        Raises:
            InputError: `path` is neither empty nor a complete or truncated document of this kind,
                or is a document written by a newer gpumix.
        """
        if not path.exists():
            return
        try:
            text = read_text(path)
            if not text.strip(_NOTHING):
                return
            there = _parse_truncated_fields(text)
        except (OSError, ValueError):
            there = {}
        if there.get("kind") != cls.KIND:
            raise InputError(
                f"this is no {cls.KIND}, and is not overwritten",
                code="document-not-overwritten",
                where=str(path),
                fix="write elsewhere, or remove it",
            )
        if _is_newer(cls, there):
            raise _make_wrong_kind_error(cls, there, path, "write elsewhere, or remove it")


def refuse_duplicates(what: str, names: Iterable[str], said: str = "is named twice") -> None:
    """Raise a ValueError if a name appears twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} '{name}' {said}")


def _check_kind(cls: type[Document], text: str, path: Path, fix: str) -> None:
    """Raise an InputError for JSON of another kind or schema, or with a repeated key. Readers would
    silently take the last value of a repeated key. Invalid JSON is reported by the caller."""
    twice: list[str] = []
    try:
        fields = _parse_fields(text, twice)
    except ValueError:
        return
    if (fields.get("kind"), _get_schema_version(fields)) != (cls.KIND, cls.SCHEMA):
        raise _make_wrong_kind_error(cls, fields, path, fix)
    if twice:
        raise InputError(
            f"this is not a valid {cls.KIND}: {twice[0]}",
            code="document-key-twice",
            where=str(path),
            fix=f"leave one of them; or {fix}",
        )


def _get_schema_version(fields: dict[str, object]) -> object:
    return fields.get("schema_version", 1)


def _is_newer(cls: type[Document], fields: dict[str, object]) -> bool:
    schema = _get_schema_version(fields)
    return fields.get("kind") == cls.KIND and isinstance(schema, int) and schema > cls.SCHEMA


def _make_wrong_kind_error(
    cls: type[Document], fields: dict[str, object], path: Path, fix: str
) -> InputError:
    """Return the error for a document of another kind or schema."""
    kind, newer = fields.get("kind"), _is_newer(cls, fields)
    found = f"a {kind} of schema {_get_schema_version(fields)}" if kind else "something else"
    return InputError(
        f"a {cls.KIND} of schema {cls.SCHEMA} is wanted, this is {found}",
        code="schema-unsupported" if kind == cls.KIND else "document-of-another-kind",
        where=str(path),
        why="a newer gpumix wrote it" if newer else "",
        fix=f"install that version; or {fix}" if newer else fix,
    )


def _make_invalid_error(
    cls: type[Document], text: str, error: ValidationError, path: Path, fix: str
) -> InputError:
    """Return the error for the first problem in a document, with a suggested fix."""
    from gpumix.schema.reading.error_text import (
        translate_errors,  # imported here: it depends on documents
    )

    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        said = errors[0]["msg"].removeprefix("Invalid JSON: ")
        if path.suffix in (".yaml", ".yml"):
            return InputError(
                f"this is YAML, not a {cls.KIND}", code="document-is-yaml", where=str(path), fix=fix
            )
        return InputError(
            f"this is not a valid {cls.KIND}: it is no JSON: {said}",
            code="document-not-json",
            where=str(path),
            fix=fix,
        )
    problem = translate_errors(cls, _parse_fields(text), errors)[0]
    place = _format_key_path(text, problem.keys)
    return InputError(
        f"this is not a valid {cls.KIND}: {problem.what}",
        code="document-invalid",
        where=f"{path}{': ' + place if place else ''}",
        fix=f"{problem.fix or 'correct it'}; or {fix}",
    )


def _parse_fields(text: str, twice: list[str] | None = None) -> dict[str, object]:
    """Return the fields of a JSON document, or an empty dict if the JSON is not a mapping.

    Args:
        twice: collects a description of each repeated key.

    Raises:
        ValueError: the text is not JSON.
    """

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if twice is not None and len(found) < len(pairs):
            name = next(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
            of = [f" of '{found[n]}'" for n in _NAMES if n in found and n != name][:1]
            twice.append(f"key '{name}'{''.join(of)} is given twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=mapping)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value if isinstance(value, dict) else {}


def _parse_truncated_fields(text: str) -> dict[str, object]:
    """Return the fields of a document; for a truncated document, only the kind and schema."""
    with suppress(ValueError):
        return _parse_fields(text)
    found = _BEGINS.match(text)
    if found is None:
        return {}
    schema = found["schema"]
    return {"kind": found["kind"]} | ({"schema_version": int(schema)} if schema else {})


def _format_key_path(text: str, keys: tuple[int | str, ...]) -> str:
    """Return the path of `keys` in a document's JSON, naming list items where possible."""
    if not keys:
        return ""
    here: Any = _parse_fields(text)
    parts = []
    for key in keys:
        inside = range(len(here)) if isinstance(here, list) else here
        here = here[key] if isinstance(inside, dict | range) and key in inside else None
        names = [here[n] for n in _NAMES if n in here] if isinstance(here, dict) else []
        parts.append(f"{key} ({names[0]})" if names and isinstance(key, int) else str(key))
    return ".".join(parts)
