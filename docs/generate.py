"""Writes the reference pages: docs/job.md, docs/cli.md and docs/python.md.

    python docs/generate.py            # write them
    python docs/generate.py --check    # only name those that are out of date, and fail

Each page is a beginning by hand (docs/parts/PAGE.md) and what the code says of itself. A test holds
that the pages are up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parts import keys, names, verbs

DOCS = Path(__file__).parent
PAGES = {"job": keys.tables, "cli": verbs.tables, "python": names.sections}
NOTE = "<!-- made by `python docs/generate.py`; the beginning is docs/parts/{page}.md -->"


def page(name: str) -> str:
    """The whole of docs/`name`.md."""
    beginning = (DOCS / "parts" / f"{name}.md").read_text(encoding="utf-8").rstrip()
    return f"{NOTE.format(page=name)}\n\n{beginning}\n\n{PAGES[name]()}".rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the reference pages.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for name in PAGES:
        path, text = DOCS / f"{name}.md", page(name)
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
