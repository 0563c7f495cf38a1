"""The words of the pages: no phrase of the ban list, first sentences that speak to the reader."""

from __future__ import annotations

import sys

import pytest

from helpers.pages import ROOT

sys.path.append(str(ROOT / "docs"))

import prose


def test_no_page_has_a_problem():
    assert not prose.problems()


@pytest.mark.parametrize(
    ("text", "line", "instead"),
    [
        ("It begins\nanew there.", 2, "again"),
        ("A rank\nof all is\ntold of it.", 2, "is reported, is shown"),
        ("A thousand million of them.", 1, "billion"),
        ("Ranks of a pipeline\nparallel stage.", 1, "pipeline stage"),
        ("Ranks of a team.", 1, "tensor-parallel group"),
    ],
)
def test_phrases_are_found_over_ends_of_lines(text, line, instead):
    ((place, _, found),) = prose.bad_words(text)
    assert (place, found) == (line, instead)


def test_code_is_no_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nYou see `anew`.\n\n    anew\n\n```text\nas ever\n```\n")
    assert not list(prose.bad_words(prose.prose(page)))
    assert prose.first_sentence(page.read_text()) == "You see `anew`."


def test_a_page_that_begins_with_a_block_has_no_first_sentence():
    assert prose.first_sentence("# Title\n\n    gpumix plan\n\nYou see it.\n") == ""
