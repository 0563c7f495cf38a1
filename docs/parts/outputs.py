"""What commands print, in the pages that show it.

A page says `<!-- output of: gpumix plan ... -->`, and the block that follows is what that command
prints; with `| head -12` at the end, its first lines. Commands of a page run one after the other in
an empty folder; they are those that need neither devices nor files of the reader's.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from typer.testing import CliRunner

from gpumix.cli import app

SHOWN = re.compile(
    r"(<!-- output of: gpumix (?P<words>[^>]*) -->\n\n```text\n)(?:.*?\n)??(```)", re.DOTALL
)
WIDTH = 80


def filled(page: str) -> str:
    """A page with what its commands print now."""
    if SHOWN.search(page) is None:
        return page
    with tempfile.TemporaryDirectory() as folder, chdir(folder), _width(WIDTH):
        return SHOWN.sub(lambda found: f"{found[1]}{_printed(found['words'])}\n{found[3]}", page)


def pages(docs: Path) -> list[Path]:
    """Pages that are written by hand."""
    return [
        docs.parent / "README.md",
        *sorted(docs.glob("*.md")),
        *sorted(docs.glob("guides/*.md")),
    ]


def _printed(words: str) -> str:
    command, _, most = " ".join(words.split()).partition(" | head -")
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "a bug in gpumix" not in done.output, done.output
    lines = [line.rstrip() for line in done.output.rstrip().splitlines()]
    return "\n".join(lines[: int(most) if most else None])


@contextmanager
def _width(columns: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
