"""Input errors in plain English: the problem, its line, and the nearest valid word.

Translates pydantic's errors, removes the noise of unions, and combines all problems of a file into
one `InputError`. Used by `schema.reading.read`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpumix.schema.cluster.cluster import CLASS_NAME
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import FACTORY
from gpumix.schema.reading.job_key_aliases import KEY_BY_ALIAS
from gpumix.schema.reading.yaml_locations import Keys, Tree, YamlLocation, show_keys, show_value

M = TypeVar("M", bound=BaseModel)

_KIND = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "path_type": "a path",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "of length {min_length} or more",
    "too_long": "a list of {max_length}",  # only tuples of fixed length have a maximum length
    "string_too_short": "of length {min_length} or more",
    "literal_error": "{expected}",
}
_PATTERN = {
    FACTORY: "of the form module:function",
    CLASS_NAME: "of letters, digits, '.', '_' and '-', a letter or digit first",
}


@dataclass(frozen=True)
class Problem:
    """A problem at `keys`, or `between` the values below `keys`; `first` is the location of a
    conflicting value. `code` becomes the error's."""

    keys: Keys
    what: str
    fix: str = ""
    code: str = "value-invalid"
    first: Keys | None = None
    between: bool = False


def validate_strictly(
    model: type[M], value: object, keys: Keys = ()
) -> tuple[M | None, list[Problem]]:
    """Validate `value`, found at `keys` of its file, as `model`; return None and problems on
    errors.

    Strict, because `max_steps: yes` is not 1. As JSON, because strict JSON mode still converts text
    to a path and a list to a tuple.
    """
    try:
        return model.model_validate_json(json.dumps(value), strict=True), []
    except ValidationError as error:
        return None, translate_errors(model, value, error.errors(), keys)


def combine_problems(problems: Iterable[Problem], tree: Tree) -> InputError:
    """Combine all `problems` into one error, in file order, followed by `--set` arguments."""
    told = sorted(
        (_locate_problem(p, tree) for p in problems),
        key=lambda t: (t[0].line == 0, t[0].line, t[0].column),
    )
    place, what, fix, code = told[0]
    rest = [f"  also {p}: {w}" + (f" ({f})" if f else "") for p, w, f, _ in told[1:]]
    return InputError(
        "\n".join([what, *rest]), code=code, where=str(place), fix=fix or f"correct {place}"
    )


def suggest(meant: str | None, choices: Iterable[str], what: str) -> str:
    """Return the fix for a wrong word: the intended word if known, else all `choices`."""
    return did_you_mean(meant) or f"{what}: {', '.join(choices)}"


def did_you_mean(meant: str | None) -> str:
    """Return the question, or an empty string for None."""
    return "" if meant is None else f"did you mean '{meant}'?"


def find_nearest(word: str, choices: Collection[str]) -> str | None:
    """Return the choice closest to `word`, by initials ('learning_rate': 'lr') or by letters."""
    initials = "".join(part[:1] for part in re.split(r"[_\W]+", word))
    if len(initials) > 1 and initials in choices:
        return initials
    near = get_close_matches(word, choices, n=1)
    return near[0] if near else None


def _locate_problem(problem: Problem, tree: Tree) -> tuple[YamlLocation, str, str, str]:
    first = "" if problem.first is None else f" (first at {tree.place(problem.first)})"
    place, what = tree.place(problem.keys), problem.what
    if problem.between:
        what = f"'{show_keys(problem.keys)}': {what}"
        # The override is at fault: it conflicts with values of the file.
        place = next(tree.overrides(problem.keys), place)
    return place, what + first, problem.fix, problem.code


def translate_errors(
    model: type[BaseModel], value: object, errors: Sequence[ErrorDetails], top: Keys = ()
) -> list[Problem]:
    """Return the problems of a `value` that is not a valid `model`, one per location. A missing key
    is not reported if an unknown key was probably meant for it."""
    at: dict[Keys, list[ErrorDetails]] = {}
    for error in errors:
        at.setdefault(_real_keys(value, error), []).append(error)
    unknown = {keys for keys, same in at.items() if same[0]["type"] == "extra_forbidden"}
    meant = {(*keys[:-1], _guess_meant_key(model, keys)) for keys in unknown}
    return [
        _describe_unknown_key(model, keys, top)
        if keys in unknown
        else _describe_wrong_value(model, keys, same, top)
        for keys, same in at.items()
        if same[0]["type"] != "missing" or keys not in meant
    ]


def _real_keys(value: Any, error: ErrorDetails) -> Keys:
    """Return the error's location without names of union branches, which are not keys of the
    file."""
    keys: list[str | int] = []
    for part in error["loc"]:
        inside = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if inside or (isinstance(value, dict) and part in value):
            value = value[part]
            keys.append(part)
        elif error["type"] == "missing" and part == error["loc"][-1]:
            keys.append(part)
    return tuple(keys)


def _describe_unknown_key(model: type[BaseModel], below: Keys, top: Keys) -> Problem:
    keys, valid = (*top, *below), list(_fields(_model_at(model, below[:-1])))
    meant, what = _guess_meant_key(model, below), f"unknown key '{show_keys(keys)}'"
    if len(below) > 1 and meant is not None and meant not in valid:
        section = show_keys(keys[:-1])
        fix = f"did you mean '{meant}', next to '{section}' and not in it?"
        return Problem(keys, what, fix, code="key-unknown")
    return Problem(keys, what, suggest(meant, valid, "valid keys"), code="key-unknown")


def _guess_meant_key(model: type[BaseModel], keys: Keys) -> str | None:
    """Guess the valid key meant by an unknown key: by a name known from elsewhere, an equally named
    nested key, or a similar name. Relative to the key's section, if it is in it."""
    name, every = str(keys[-1]), list(_dotted(model))
    known = KEY_BY_ALIAS.get(".".join(map(str, keys)))
    if known in every:
        return known.removeprefix("".join(f"{key}." for key in keys[:-1]))
    deeper = [k for k in every if k.endswith(f".{name}")] if len(keys) == 1 else []
    if len(deeper) == 1:
        return deeper[0]
    return find_nearest(name, list(_fields(_model_at(model, keys[:-1]))))


def _describe_wrong_value(
    model: type[BaseModel], below: Keys, errors: Sequence[ErrorDetails], top: Keys
) -> Problem:
    """Return the problem for a missing or wrong value; for a union, list the types of all
    branches."""
    keys, error = (*top, *below), errors[0]
    shown = show_keys(keys)
    if error["type"] == "missing":
        return Problem(keys, f"'{shown}' is missing", _example(model, below), code="key-missing")
    if error["type"] == "value_error":
        said = str(error["ctx"]["error"])
        return Problem(keys, said, code="values-conflict", between=bool(shown))
    # A single value is accepted for a list, so a non-list is not reported as too short.
    short = [e for e in errors if e["type"] == "too_short" and e["input"] != []]
    told = [e for e in errors if e not in short] or errors
    wanted = " or ".join(dict.fromkeys(_wanted(e) for e in told))
    if Path in _parts(_annotation(model, below)):
        wanted = wanted.replace("text", "a path")
    what = f"'{shown}' must be {wanted}, it is {show_value(error['input'])}"
    return Problem(keys, what, _nearest_choice(error))


def _example(model: type[BaseModel], keys: Keys) -> str:
    """Return the fix for a missing key if its field has an example."""
    for name, field in _model_at(model, keys[:-1]).model_fields.items():
        if field.examples and keys[-1] == (field.alias or name):
            written = yaml.safe_dump({keys[-1]: field.examples[0]}, default_flow_style=True)
            return f"add {written.strip()[1:-1]}"
    return ""


def _wanted(error: ErrorDetails) -> str:
    context: dict[str, Any] = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch":
        return _PATTERN[context["pattern"]]
    if error["type"] in _KIND:
        return _KIND[error["type"]].format(**context)
    return f"valid ({error['msg']})"


def _nearest_choice(error: ErrorDetails) -> str:
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
    return did_you_mean(find_nearest(error["input"], choices))


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Return the annotation of each key as written in files."""
    return {f.alias or name: f.annotation for name, f in model.model_fields.items()}


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation such as `tuple[Row, ...]` or `Form | None`, and all components."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part


def _model_at(model: type[BaseModel], keys: Keys) -> type[BaseModel]:
    """Return the model containing the fields below `keys`; indices and user-defined names are
    skipped."""
    for key in keys:
        model = next(_models(_fields(model).get(str(key))), model)
    return model


def _annotation(model: type[BaseModel], keys: Keys) -> Any:
    """Return the annotation of the field containing `keys`; None if there is none."""
    names = [i for i, key in enumerate(keys) if isinstance(key, str)]
    if not names:
        return None
    return _fields(_model_at(model, keys[: names[-1]])).get(str(keys[names[-1]]))


def _dotted(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield all dotted keys of a file, except keys inside lists and user-defined names."""
    for key, annotation in _fields(model).items():
        yield f"{above}{key}"
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _dotted(annotation, f"{above}{key}.")
