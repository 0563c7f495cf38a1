"""Writes what the pages take from the code.

    python docs/generate.py            # write it
    python docs/generate.py --check    # only name what is out of date, and fail

* docs/job.md, docs/cli.md and docs/python.md: a beginning by hand (docs/parts/PAGE.md), and what
  the code says of itself;
* docs/job.schema.json, for editors;
* what commands print, in pages that show it (`<!-- output of: gpumix ... -->`).

A test holds that all of it is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from parts import integrations, keys, names, outputs, schema, verbs

DOCS = Path(__file__).parent


def library() -> str:
    return f"{names.sections()}\n\n{integrations.sections()}"


PAGES = {"job": keys.tables, "cli": verbs.tables, "python": library}
NOTE = "<!-- made by `python docs/generate.py`; the beginning is docs/parts/{page}.md -->"


def page(name: str) -> str:
    """The whole of docs/`name`.md."""
    beginning = (DOCS / "parts" / f"{name}.md").read_text(encoding="utf-8").rstrip()
    return f"{NOTE.format(page=name)}\n\n{beginning}\n\n{PAGES[name]()}".rstrip() + "\n"


def files() -> Iterator[tuple[Path, str]]:
    """Each file, and what should be in it."""
    for name in PAGES:
        yield DOCS / f"{name}.md", page(name)
    yield DOCS / "job.schema.json", schema.text()
    for path in outputs.pages(DOCS):
        if path.stem not in PAGES:
            yield path, outputs.filled(path.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what the pages take from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for path, text in files():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(text, encoding="utf-8")
    said = "out of date" if check else "written"
    sys.stderr.write(f"{said}: {', '.join(stale) or 'none'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
