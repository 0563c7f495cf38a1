"""Parameter groups by patterns of the model's own names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gpumix.spec.errors import InputError

if TYPE_CHECKING:
    from gpumix.engine.engine import Engine


def parameter_groups(engine: Engine, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """What an optimizer takes as its first argument: a parameter goes into the first group that
    matches its name, the others into a last one without settings of its own.

        gpumix.parameter_groups(engine, {"match": "*.bias", "weight_decay": 0.0})

    Args:
        groups: settings of the optimizer, and as `match` a pattern of names in which `*` stands for
            anything.

    Raises:
        InputError: a group gets no parameter, or has no `match`.
    """
    without = next((group for group in groups if "match" not in group), None)
    if without is not None:
        raise InputError(
            f"the parameter group {without} does not say which parameters it is for",
            fix="give it a pattern of names, such as `'match': '*.bias'`",
        )
    named = list(engine.named_parameters())
    patterns = [group["match"] for group in groups]
    numbers = matches(patterns, [name for name, _ in named], engine.trained_names())
    made: list[dict[str, Any]] = [
        {**{key: value for key, value in group.items() if key != "match"}, "params": []}
        for group in (*groups, {"match": "*"})
    ]
    for (name, parameter), number in zip(named, numbers):
        made[number]["params"].append((name, parameter))
    # An optimizer wants a group, also of a rank whose stage trains nothing.
    return [group for group in made if group["params"]] or made[-1:]


def matches(
    patterns: Sequence[str], names: Sequence[str], every: Sequence[str] | None = None
) -> list[int]:
    """For each name the number of the first pattern that it matches, or how many patterns there
    are if none does.

    Args:
        every: the names of all parameters, where `names` are those of a part of them.

    Raises:
        InputError: a pattern is not the first that matches for any of all names.
    """
    every = names if every is None else every
    matched = {_first(patterns, name) for name in every}
    for number, pattern in enumerate(patterns):
        if number not in matched:
            raise _idle(pattern, patterns, every)
    return [_first(patterns, name) for name in names]


def _first(patterns: Sequence[str], name: str) -> int:
    hits = (number for number, pattern in enumerate(patterns) if fnmatchcase(name, pattern))
    return next(hits, len(patterns))


def _idle(pattern: str, patterns: Sequence[str], names: Sequence[str]) -> InputError:
    hits = [name for name in names if fnmatchcase(name, pattern)]
    what = f"no trained parameter is left for the group '{pattern}'"
    if hits:
        before = patterns[_first(patterns, hits[0])]
        return InputError(
            what,
            why=f"'{before}' comes first and takes {hits[0]}",
            fix="put the narrower pattern first",
        )
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3) or names[:3]
    return InputError(
        what,
        why=f"no name matches; names are like {', '.join(near)}",
        fix="`*` stands for anything: '*.bias' are all biases",
    )
