"""The base of every value: frozen, strict about keys, one JSON file each.

A value that crosses a border between verbs is a `Document`: it names its kind and schema version,
so that a plan given where a profile is wanted is an error that says so.
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

from gpumix.spec.errors import InputError
from gpumix.spec.files import read_text, replace_text, why_unreadable

# What tells the items of a list apart, in the documents that have them.
_NAMES = ("name", "id", "device", "device_class", "operation")


# What a file holds whose bytes had not reached the disk when its machine stopped.
_NOTHING = " \t\r\n\0"
# As `Document.save` writes it.
_BEGINS = re.compile(
    r'\{\s*"kind": "(?P<kind>[a-z -]+)"(?:,\s*"schema_version": (?P<schema>\d+),)?'
)


class Value(BaseModel):
    """A frozen value; unknown keys are errors, and so are numbers that are not finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings"
    )

    def __copy__(self) -> Self:
        """A copy that has its fields only: `model_copy` may give it others, for which a cached
        property of this value would be wrong."""
        copied = super().__copy__()
        vars(copied).clear()
        vars(copied).update(self._fields_only())
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """What is pickled: the fields, without cached properties."""
        return super().__getstate__() | {"__dict__": self._fields_only()}

    def _fields_only(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in type(self).model_fields if name in vars(self)}

    def digest(self) -> str:
        """Twelve hex digits that change when any field changes."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Document(Value):
    """A value that lives in a JSON file of its own."""

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = ""  # a command, where it is no verb of the kind's own name

    kind: str
    schema_version: int = 1

    @classmethod
    def load(cls, path: Path, *, fix: str = "") -> Self:
        """Read the document from `path`.

        Args:
            fix: what to do where it is wrong; by default, make one.

        Raises:
            InputError: the file is missing, unreadable, no JSON, says one thing twice, or is of
                another kind or schema.
        """
        made_by = cls.MADE_BY or f"gpumix {cls.KIND} JOB.yaml --output {cls.KIND}.json"
        fix = fix or f"make one with `{made_by}`"
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            inside = path / f"{cls.KIND}.json"
            raise InputError(
                f"cannot read the {cls.KIND}",
                where=str(path),
                why=why_unreadable(error),
                fix=f"give {inside}" if inside.exists() else fix,
            ) from error
        _check_kind(cls, text, path, fix)
        try:
            return cls.model_validate_json(text, strict=True)  # "4" and 4.0 are no 4
        except ValidationError as error:
            raise _invalid(cls, text, error, path, fix) from error

    def save(self, path: Path) -> None:
        """Write the document to `path` in one atomic step.

        Raises:
            InputError: there is what may not be replaced; see `check_replaceable`.
            MachineError: it cannot be written.
        """
        self.check_replaceable(path)
        replace_text(
            path,
            self.model_dump_json(indent=1) + "\n",
            cannot=f"cannot write the {self.KIND}",
        )

    @classmethod
    def check_replaceable(cls, path: Path) -> None:
        """See that nothing is lost if such a document is written to `path`.

        Raises:
            InputError: there is something else than a former document of this kind, whole, cut off
                or empty, or what a newer gpumix wrote.
        """
        if not path.exists():
            return
        try:
            text = read_text(path)
            if not text.strip(_NOTHING):
                return
            there = _fields_of_part(text)
        except (OSError, ValueError):
            there = {}
        if there.get("kind") != cls.KIND:
            raise InputError(
                f"this is no {cls.KIND}, and is not overwritten",
                where=str(path),
                fix="write elsewhere, or remove it",
            )
        if _is_newer(cls, there):
            raise _other(cls, there, path, "write elsewhere, or remove it")


def refuse_twins(what: str, names: Iterable[str], said: str = "is named twice") -> None:
    """Raises ValueError if a name comes twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} '{name}' {said}")


def _check_kind(cls: type[Document], text: str, path: Path, fix: str) -> None:
    """Refuse JSON that says it is something else, or that says a thing twice, of which any reader
    would take the last; what is no JSON at all is told elsewhere."""
    twice: list[str] = []
    try:
        fields = _fields(text, twice)
    except ValueError:
        return
    if (fields.get("kind"), _schema(fields)) != (cls.KIND, cls.SCHEMA):
        raise _other(cls, fields, path, fix)
    if twice:
        raise InputError(
            f"this is not a valid {cls.KIND}: {twice[0]}",
            where=str(path),
            fix=f"leave one of them; or {fix}",
        )


def _schema(fields: dict[str, object]) -> object:
    return fields.get("schema_version", 1)


def _is_newer(cls: type[Document], fields: dict[str, object]) -> bool:
    schema = _schema(fields)
    return fields.get("kind") == cls.KIND and isinstance(schema, int) and schema > cls.SCHEMA


def _other(cls: type[Document], fields: dict[str, object], path: Path, fix: str) -> InputError:
    """The error for a document of another kind or schema."""
    kind, newer = fields.get("kind"), _is_newer(cls, fields)
    found = f"a {kind} of schema {_schema(fields)}" if kind else "something else"
    return InputError(
        f"a {cls.KIND} of schema {cls.SCHEMA} is wanted, this is {found}",
        where=str(path),
        why="a newer gpumix wrote it" if newer else "",
        fix=f"install that version; or {fix}" if newer else fix,
    )


def _invalid(
    cls: type[Document], text: str, error: ValidationError, path: Path, fix: str
) -> InputError:
    """The first thing that is wrong in a document, and what may have been meant."""
    from gpumix.spec.read_errors import problems  # which knows documents

    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        said = errors[0]["msg"].removeprefix("Invalid JSON: ")
        return InputError(
            f"this is not a valid {cls.KIND}: it is no JSON: {said}", where=str(path), fix=fix
        )
    problem = problems(cls, _fields(text), errors)[0]
    place = _place(text, problem.keys)
    return InputError(
        f"this is not a valid {cls.KIND}: {problem.what}",
        where=f"{path}{': ' + place if place else ''}",
        fix=f"{problem.fix or 'mend it'}; or {fix}",
    )


def _fields(text: str, twice: list[str] | None = None) -> dict[str, object]:
    """The fields of a document's JSON, none of any other JSON; raises ValueError if it is none.

    Args:
        twice: takes, in words, each key that one mapping has twice.
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


def _fields_of_part(text: str) -> dict[str, object]:
    """As `_fields`; of a document that was cut off, those by which it is known."""
    with suppress(ValueError):
        return _fields(text)
    found = _BEGINS.match(text)
    if found is None:
        return {}
    schema = found["schema"]
    return {"kind": found["kind"]} | ({"schema_version": int(schema)} if schema else {})


def _place(text: str, keys: tuple[int | str, ...]) -> str:
    """Where `keys` lead in a document's JSON; what stands in a list is named too."""
    if not keys:
        return ""
    here: Any = _fields(text)
    parts = []
    for key in keys:
        inside = range(len(here)) if isinstance(here, list) else here
        here = here[key] if isinstance(inside, dict | range) and key in inside else None
        names = [here[n] for n in _NAMES if n in here] if isinstance(here, dict) else []
        parts.append(f"{key} ({names[0]})" if names and isinstance(key, int) else str(key))
    return ".".join(parts)
