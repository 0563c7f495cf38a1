"""The verdicts on tests that other projects wrote, and what they are read from."""

from __future__ import annotations

import re

import pytest

from suites_of import results


@pytest.mark.parametrize("pattern", results.REFUSED)
def test_what_is_refused_is_told_by_the_page(pattern):
    page, words = results.REFUSED[pattern]
    assert words in (results.DOCS / page).read_text(encoding="utf-8")
    re.compile(pattern)


def test_differences_have_reasons():
    assert all(len(why.split()) >= 5 for why in results.differences().values())


def line(side: str, outcome: str, **more: str) -> results.Line:
    return {"suite": "trl", "test": "tests/a.py::test_b", "side": side, "outcome": outcome, **more}


REFUSAL = "InputError: AcceleratorConfig: split_batches=True has no meaning with gpumix"


@pytest.mark.parametrize(
    "stock, ours, verdict",
    [
        (line("stock", "skipped"), None, "skipped"),
        (line("stock", "failed", why="an OfflineModeIsEnabled error"), None, "needs_network"),
        (line("stock", "failed", why="assert 1 == 2"), None, "failed_by_stock"),
        (line("stock", "passed"), None, "not_tried"),
        (line("stock", "passed"), line("ours", "passed"), "passed_by_ours"),
        (line("stock", "passed"), line("ours", "failed", why="KeyError"), "failed"),
        (line("stock", "passed"), line("ours", "failed", refusal="InputError: other"), "failed"),
        (
            line("stock", "passed"),
            line("ours", "failed", refusal=REFUSAL),
            "refused_as_documented",
        ),
    ],
)
def test_verdicts(stock, ours, verdict):
    assert results.verdict_of(stock, ours) == verdict


def test_figures_count_each_test_once():
    lines = [line("stock", "passed"), line("ours", "passed")]
    figures = results.figures_of(lines, ["trl"])
    assert (figures["tests"], figures["passed_by_ours"], figures["trl_failed"]) == (1, 1, 0)
