"""Order of a model's unit calls: complete, and independent of data.

For any other model, measurements would not hold for the next batch, and no plan could assign the
computation; so the error is raised here, before planning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumix.engine.model.forward_coroutine import ModelError


def check_all_called(units: Iterable[str], calls: Sequence[str]) -> None:
    """Raise a ModelError for units skipped in a pass."""
    skipped = [name for name in units if name not in calls]
    if skipped:
        raise ModelError(
            f"the model did not call its unit '{skipped[0]}'"
            if calls
            else f"the model called none of its units: '{skipped[0]}' and so on",
            code="unit-not-called",
            where="while a batch was measured",
            why="every unit has its place in each pass: units are called in the same order by "
            "every rank, whatever the data",
            fix="call it whatever the data; or name those modules that are always called: "
            "`model: {units: [...]}` in the job, or `units=[...]` in Python",
        )


class CallOrder:
    """Order of unit calls, recorded in the first complete pass."""

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._whole = False

    def check_call(self, number: int, unit: str) -> None:
        """Check call `number` of a pass, counted from 1; an empty `unit` means the end of the pass.

        Raises:
            ModelError: an earlier pass had another call there.
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
                code="unit-order-varies",
                where="while a batch was measured",
                why="the order of unit calls must be the same on every rank and in every step",
                fix="make the order the same for all data, and leave no unit out at random "
                "(`layerdrop: 0`)",
            )
