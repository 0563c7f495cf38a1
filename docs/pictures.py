"""Makes the pictures of the pages from a run's folder, with a headless Chromium.

    python docs/pictures.py runs/demo            # writes them into docs/images
    python docs/pictures.py runs/demo --to shots

Take a run of a quiet machine: numbers of it are shown.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import replace
from io import StringIO
from pathlib import Path

from parts import browser
from rich.console import Console

from gpumix.report.facts import RunFacts
from gpumix.report.live import render_frame
from gpumix.report.page import render_page
from gpumix.report.run import Run, read_run
from gpumix.train.run_figures.history import History

WIDE, NARROW, PLAN, TERMINAL = 1400, 390, 1140, 1400
COLUMNS = 120
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
CLOSE = "body {padding: 0 1.5rem}"
BEGINNING = "#next, #answer, #cluster, #plan, #memory"
BEGINNING_ALONE = f"footer, main > section:not({BEGINNING}) {{display: none}}"
PLAN_ALONE = "header > :not(.devices), footer, main > section:not(#cluster, #plan) {display: none}"
PLAN_ALONE += f" section {{border-top: 0}} {CLOSE}"
TERMINAL_ALONE = "<!doctype html><style>body {margin: 0} svg {width: 100%; height: auto}</style>"


def made(run: Run, to: Path, work: Path) -> None:
    """All of them."""
    beginning, plan = work / "beginning.html", work / "plan.html"
    planned = replace(run, history=History())  # before it was rebalanced
    for part, of, alone in ((beginning, run, BEGINNING_ALONE), (plan, planned, PLAN_ALONE)):
        part.write_text(_parts(render_page(of), alone), encoding="utf-8")
    _shown(beginning, to / "report-light.png", width=WIDE, dark=False)
    _shown(beginning, to / "report-dark.png", width=WIDE, dark=True)
    _shown(beginning, to / "report-narrow.png", width=NARROW, dark=False)
    for dark, name in ((False, "plan-light"), (True, "plan-dark")):
        _shown(plan, to / f"{name}.png", width=PLAN, dark=dark)
    top = work / "top.html"
    top.write_text(_top(run), encoding="utf-8")
    _shown(top, to / "top.png", width=TERMINAL, dark=True)


def _shown(at: Path, to: Path, *, width: int, dark: bool) -> None:
    height = browser.size(at, width=width, dark=dark).height
    browser.picture(at, to, width=width, height=height, dark=dark)


def _parts(report: str, style: str) -> str:
    """The page with some of its parts alone, which its policy would not allow."""
    return POLICY.sub("", report).replace("</head>", f"<style>{style}</style></head>")


def _top(run: Run) -> str:
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(render_frame(RunFacts(run), width=COLUMNS))
    return TERMINAL_ALONE + console.export_svg(title=f"gpumix top {run.folder}")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "images")
    given = parser.parse_args()
    if browser.chromium() is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    given.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        made(read_run(given.run), given.to, Path(work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
