"""Makes the pictures of the pages: from a run's folder with a headless Chromium, and of results.

    python docs/pictures.py runs/demo            # writes them into docs/images
    python docs/pictures.py                      # only the README's, from benchmarks/results
    python docs/pictures.py --commands           # terminals: what `plan` and `demo` print
    python docs/pictures.py runs/demo --to shots

Take a run of a quiet machine: numbers of it are shown. The words for the README's picture are
printed. The demo takes three minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from parts import browser, hero
from rich.console import Console
from rich.text import Text

from gpumix.report.facts import RunFacts
from gpumix.report.live import render_frame
from gpumix.report.page import render_page
from gpumix.report.run import Run, read_run

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
WIDE, NARROW, TERMINAL = 1400, 390, 1400
COLUMNS = 120
COMMANDS = {
    "plan-terminal": 'gpumix plan --cluster "2x rtx4090, 4x rtx3090" --model 7B',
    "demo-terminal": "gpumix demo --output-dir {folder}",
}
COMMAND_COLUMNS, COMMAND_WIDTH = 80, 1000
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
BEGINNING = "#next, #answer, #cluster, #plan, #memory"
BEGINNING_ALONE = f"footer, main > section:not({BEGINNING}) {{display: none}}"
TERMINAL_ALONE = "<!doctype html><style>body {margin: 0} svg {width: 100%; height: auto}</style>"


def made(run: Run, to: Path, work: Path) -> None:
    """Those that a browser makes."""
    beginning = work / "beginning.html"
    beginning.write_text(_parts(render_page(run), BEGINNING_ALONE), encoding="utf-8")
    _shown(beginning, to / "report-light.png", width=WIDE, dark=False)
    _shown(beginning, to / "report-dark.png", width=WIDE, dark=True)
    _shown(beginning, to / "report-narrow.png", width=NARROW, dark=False)
    top = work / "top.html"
    top.write_text(_top(run), encoding="utf-8")
    _shown(top, to / "top.png", width=TERMINAL, dark=True)


def typed(to: Path, work: Path) -> None:
    """Terminals of 80 columns with a command and all that it prints, in its colours."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COMMAND_COLUMNS)}
    for name, command in COMMANDS.items():
        done = subprocess.run(
            command.format(folder=work / "demo"),
            shell=True,
            check=True,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        console = Console(record=True, width=COMMAND_COLUMNS, file=StringIO(), force_terminal=True)
        console.print(Text(f"$ {command.partition(' --output')[0]}", style="bold"))
        console.print(Text.from_ansi(done.stdout))
        page = work / f"{name}.html"
        page.write_text(TERMINAL_ALONE + console.export_svg(title="gpumix"), encoding="utf-8")
        _shown(page, to / f"{name}.png", width=COMMAND_WIDTH, dark=True)


def drawn(to: Path) -> str:
    """That of the README, by the newest results that have it; return its words."""
    pages = sorted(RESULTS.glob("*.md"), reverse=True)
    texts = (page.read_text(encoding="utf-8") for page in pages)
    speeds, shares = hero.read_results(next(text for text in texts if hero.TITLE in text))
    for dark, name in ((False, "plan-light"), (True, "plan-dark")):
        text = hero.svg(speeds, shares, dark=dark)
        (to / f"{name}.svg").write_text(text, encoding="utf-8")
    return hero.alternative_text(speeds, shares)


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
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--commands", action="store_true", help="terminals with commands")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "images")
    given = parser.parse_args()
    if (given.run is not None or given.commands) and browser.chromium() is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    given.to.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{drawn(given.to)}\n")
    with tempfile.TemporaryDirectory() as work:
        if given.run is not None:
            made(read_run(given.run), given.to, Path(work))
        if given.commands:
            typed(given.to, Path(work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
