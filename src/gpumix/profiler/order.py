"""The calls of a model's units: all of them, in one order, whatever the data.

What is measured of a model that does it otherwise would not be true of its next batch, and no plan
could say who computes what; so it is told here, before anything is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from gpumix.engine.coroutine import ModelError


def all_called(units: Iterable[str], calls: Sequence[str]) -> None:
    """Raise a ModelError for units that a pass did not come by."""
    skipped = [name for name in units if name not in calls]
    if skipped:
        raise ModelError(
            f"the model did not call its unit '{skipped[0]}'"
            if calls
            else f"the model called none of its units: '{skipped[0]}' and so on",
            where="while a batch was measured",
            why="every unit has its place in each pass: units are called in the same order by "
            "every rank, whatever the data",
            fix="call it whatever the data; or name those modules that are always called: "
            "`model: {units: [...]}` in the job, or `units=[...]` in Python",
        )


def same_calls(first: Sequence[str], calls: Sequence[str]) -> None:
    """Raise a ModelError where two batches were not computed by the same calls."""
    for number, (one, other) in enumerate(zip_longest(first, calls, fillvalue="none"), 1):
        if one != other:
            raise ModelError(
                "the model calls its units in an order that depends on its data: call "
                f"{number} was of '{one}' for one batch, of '{other}' for another",
                why="the order of unit calls must be the same on every rank and in every step",
                fix="make the order the same for all data",
            )
