"""Parameter groups by patterns of the model's own names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gpumix.schema.errors import InputError

if TYPE_CHECKING:
    from gpumix.engine.engine import Engine


def parameter_groups(engine: Engine, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer. A parameter goes into the first group that matches
    its name, all others into a last group without settings.

        gpumix.parameter_groups(engine, {"match": "*.bias", "weight_decay": 0.0})

    Args:
        groups: settings of the optimizer, and as `match` a pattern of names in which `*` matches
            anything.

    Raises:
        InputError: a group gets no parameter, or has no `match`.
    """
    without = next((group for group in groups if "match" not in group), None)
    if without is not None:
        raise InputError(
            f"the parameter group {without} does not name its parameters",
            code="parameter-group-without-names",
            fix="give it a pattern of names, such as `'match': '*.bias'`",
        )
    named = list(engine.named_parameters())
    patterns = [group["match"] for group in groups]
    numbers = match_names(patterns, [name for name, _ in named], engine.trained_names())
    made: list[dict[str, Any]] = [
        {**{key: value for key, value in group.items() if key != "match"}, "params": []}
        for group in (*groups, {"match": "*"})
    ]
    for (name, parameter), number in zip(named, numbers):
        made[number]["params"].append((name, parameter))
    # An optimizer needs a group, even if the rank's stage trains nothing.
    return [group for group in made if group["params"]] or made[-1:]


def match_names(
    patterns: Sequence[str], names: Sequence[str], every: Sequence[str] | None = None
) -> list[int]:
    """Return, for each name, the index of the first matching pattern, or the number of patterns.

    Args:
        every: names of all parameters, if `names` are only a part.

    Raises:
        InputError: a pattern is not the first match of any name.
    """
    every = names if every is None else every
    matched = {_find_first_match(patterns, name) for name in every}
    for number, pattern in enumerate(patterns):
        if number not in matched:
            raise _make_unmatched_error(pattern, patterns, every)
    return [_find_first_match(patterns, name) for name in names]


def _find_first_match(patterns: Sequence[str], name: str) -> int:
    hits = (number for number, pattern in enumerate(patterns) if fnmatchcase(name, pattern))
    return next(hits, len(patterns))


def _make_unmatched_error(
    pattern: str, patterns: Sequence[str], names: Sequence[str]
) -> InputError:
    hits = [name for name in names if fnmatchcase(name, pattern)]
    what = f"no trained parameter is left for the group '{pattern}'"
    if hits:
        before = patterns[_find_first_match(patterns, hits[0])]
        return InputError(
            what,
            code="parameter-group-empty",
            why=f"'{before}' comes first and takes {hits[0]}",
            fix="put the narrower pattern first",
        )
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3) or names[:3]
    return InputError(
        what,
        code="parameter-group-empty",
        why=f"no name matches; names are like {', '.join(near)}",
        fix="`*` stands for anything: '*.bias' are all biases",
    )
