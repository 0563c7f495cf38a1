"""Figures that are beyond a limit are told of, and end a benchmark with exit code 1."""

from __future__ import annotations

import pytest

from common import print_counted

GOOD = {"gap": 0.05, "lost": 0, "picked": True, "overruns": 0}
LIMITS = {"gap": 0.05, "lost": 0, "picked": True}


def test_within_all_limits(capsys):
    assert print_counted(GOOD, as_json=True, limits=LIMITS) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("beyond", "told"),
    [
        ({"gap": 0.051}, "gap is 0.051, more than 0.05\n"),
        ({"gap": float("nan")}, "gap is nan, more than 0.05\n"),
        ({"lost": 1}, "lost is 1, more than 0\n"),
        ({"picked": False}, "picked is False, not true\n"),
        ({"overruns": 2}, "this machine was too busy"),
    ],
)
def test_beyond_one(beyond, told, capsys):
    assert print_counted(GOOD | beyond, as_json=True, limits=LIMITS) == 1
    assert capsys.readouterr().err.startswith(told)
