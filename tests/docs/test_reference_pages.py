"""The reference pages say what the code says."""

from __future__ import annotations

import os
import sys

import pytest

from helpers.pages import ROOT
from helpers.processes.commands import run
from helpers.processes.harness import run_ranks

DOCS = ROOT / "docs"


def test_what_the_code_says_of_itself_is_up_to_date():
    """If not: `python docs/generate.py`."""
    assert run_ranks(stale, 1, timeout_s=120) == [[]]


def stale() -> list[str]:
    """Files that are not what the code says; of what commands print, the first of the tutorial."""
    sys.path.append(str(DOCS))
    import generate
    from parts import outputs, schema

    tutorial = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    shown = outputs.SHOWN.search(tutorial)
    assert shown is not None
    beginning = tutorial[: shown.end()]
    files = [(DOCS / f"{name}.md", generate.page(name)) for name in generate.PAGES]
    files += [(DOCS / "job.schema.json", schema.text())]
    found = [path.name for path, text in files if path.read_text(encoding="utf-8") != text]
    return found + ["tutorial.md"] * (outputs.filled(beginning) != beginning)


@pytest.mark.extended
@pytest.mark.slow
def test_the_reference_pages_are_up_to_date():
    """With all that commands print."""
    command = [sys.executable, str(DOCS / "generate.py"), "--check"]
    done = run(command, folder=ROOT, env=os.environ, timeout_s=200)
    assert done.code == 0, done.err
