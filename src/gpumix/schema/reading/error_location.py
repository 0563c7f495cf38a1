"""Error locations for checks without knowledge of the input file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumix.schema.errors import InputError, NoFeasiblePlanError, convert_error

_WITH = " with "


@contextmanager
def locate_errors(place: str | Path) -> Iterator[None]:
    """Add the file or argument `place` to InputError and NoFeasiblePlanError raised inside. Errors
    already naming a file, an argument or two files (`join_locations`) stay unchanged."""
    try:
        yield
    except (InputError, NoFeasiblePlanError) as error:
        if (
            _has_location(error.where)
            or error.where.partition(":")[0] == str(place)
            or not str(place)
        ):
            raise
        where = f"{place}: {error.where}" if error.where else str(place)
        raise convert_error(error, type(error), where=where) from error


def join_locations(file: str | Path, other: str | Path | None) -> str:
    """Return the location of a conflict between two files, or just `file` without `other`."""
    return f"{file}{_WITH}{other}" if other else str(file)


def _has_location(where: str) -> bool:
    file = where.partition(":")[0].partition(_WITH)[0]
    try:
        return where.startswith("--") or (bool(file) and Path(file).exists())
    except (OSError, ValueError):  # not a valid file name
        return False
