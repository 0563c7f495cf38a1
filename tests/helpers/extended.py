"""Cases of a test that are left out of the usual run; `make test-extended` tries them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def every_second(cases: Iterable[Any]) -> list[Any]:
    """The cases as `pytest.mark.parametrize` takes them; the second, the fourth, ... are extended
    ones."""
    cases = list(cases)
    return left_out(cases, cases[1::2])


def every_third(cases: Iterable[Any]) -> list[Any]:
    """As `every_second`, but that of three cases the first alone is a usual one."""
    cases = list(cases)
    return left_out(cases, [case for number, case in enumerate(cases) if number % 3])


def left_out(cases: Iterable[Any], further: Collection[Any]) -> list[Any]:
    """The cases as `pytest.mark.parametrize` takes them, of which `further` are extended ones."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.extended] if case in further else [],
        )
        for case in cases
    ]


def chosen(
    request: pytest.FixtureRequest, cases: Mapping[str, T], *, by: str = "case"
) -> dict[str, T]:
    """Those that tests of this file are to try, for a fixture that makes something for all.

    Args:
        by: the parameter of tests that tells their case.
    """
    wanted = {
        item.callspec.params.get(by)
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return {name: case for name, case in cases.items() if name in wanted}
