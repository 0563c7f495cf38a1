"""Errors of what a file says, raised where nobody knows any more which file that was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumix.spec.errors import InputError, NoFeasiblePlanError

_WITH = " with "


@contextmanager
def placed(place: str | Path) -> Iterator[None]:
    """Wrong input, and plans that do not fit, are told with the file or argument that asked for
    them; errors that name one already, or two `together`, are left as they are."""
    try:
        yield
    except (InputError, NoFeasiblePlanError) as error:
        if _names_one(error.where) or error.where.partition(":")[0] == str(place) or not str(place):
            raise
        where = f"{place}: {error.where}" if error.where else str(place)
        kind = type(error)
        raise kind(error.what, where=where, why=error.why, fix=error.fix) from error


def together(file: str | Path, other: str | Path | None) -> str:
    """The place of what is wrong between two files; of one alone if there is no other."""
    return f"{file}{_WITH}{other}" if other else str(file)


def _names_one(where: str) -> bool:
    file = where.partition(":")[0].partition(_WITH)[0]
    try:
        return where.startswith("--") or (bool(file) and Path(file).exists())
    except (OSError, ValueError):  # a name that no file can have
        return False
