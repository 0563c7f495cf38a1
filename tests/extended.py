"""Cases of a test that are left out of the usual run; `make test-extended` tries them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def every_second(cases: Iterable[Any]) -> list[Any]:
    """The cases as `pytest.mark.parametrize` takes them; the second, the fourth, ... are extended
    ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.extended)
        if number % 2
        else case
        for number, case in enumerate(cases)
    ]


def chosen(request: pytest.FixtureRequest, cases: Mapping[str, T]) -> dict[str, T]:
    """Those that tests of this file are to try, for a fixture that makes something for all."""
    wanted = {
        item.callspec.params.get("case")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return {name: case for name, case in cases.items() if name in wanted}
