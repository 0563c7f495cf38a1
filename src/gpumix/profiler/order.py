"""The calls of a model's units: all of them, in one order, whatever the data.

What is measured of a model that does it otherwise would not be true of its next batch, and no plan
could say who computes what; so it is told here, before anything is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


class OneOrder:
    """The calls of every pass, as the first whole one made them."""

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._whole = False

    def reached(self, number: int, unit: str) -> None:
        """A pass has come to its call `number`, counted from 1; no unit: to its end.

        Raises:
            ModelError: an earlier one came to another there.
        """
        if not self._whole:
            self._calls[number - 1 :] = [unit] if unit else []
            self._whole = not unit
            return
        known = self._calls[number - 1] if number <= len(self._calls) else ""
        if unit != known:
            raise ModelError(
                "the model does not call its units in one order: call "
                f"{number} was of '{known or 'none'}' in one pass, of '{unit or 'none'}' in "
                "another",
                where="while a batch was measured",
                why="the order of unit calls must be the same on every rank and in every step",
                fix="make the order the same for all data, and leave no unit out at random "
                "(`layerdrop: 0`)",
            )
