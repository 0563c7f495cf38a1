"""`gpumix top`: live view of a run in a terminal. Reads files; never imports torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import Json, print_json
from gpumix.cli.verbs.report import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from gpumix.report.facts import RunFacts
    from gpumix.report.run import Run

# A failed run may restart: it says so within this time.
RESTART_WAIT_S = 2.0
# A run ends itself when a rank is silent for its `advanced.timeout`. A run silent for this many
# timeouts, or for this many of its steps, was killed along with every process that would report it.
SILENT_TIMEOUTS, SILENT_STEPS, TIMEOUT_S = 2.0, 20.0, 300.0
# Bytes of metrics.jsonl read each time, for curves: the last ten thousand steps or so.
NEWEST_BYTES = 4 * 2**20
MEASURING = "the run has started: devices are being measured"


def top(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    every_s: Annotated[
        float,
        typer.Option(
            "--every", min=0.1, max=3600, metavar="SECONDS", help="Seconds between frames."
        ),
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Watch a run live: progress, speed, what to do next, each GPU, last events.

    Only reads the run's files, so it may be called from anywhere, and several times. Ends with the
    run, with code 0 however that ended (see --json); Ctrl-C ends it, not the run. If stdout is not
    a terminal it prints one frame. Its numbers are those of gpumix report.

    Example: gpumix top runs/first
    """
    from gpumix.report.live import render_frame
    from gpumix.report.run import is_measuring
    from gpumix.train.console.terminal import get_stdout_console

    console = get_stdout_console()
    if as_json:
        print_json(_read_facts(run).as_dict())
    elif once or not console.is_interactive:
        if is_measuring(run):
            console.print(MEASURING)
            return
        console.print(render_frame(_read_facts(run), width=console.width))
    else:
        _wait_for_plan(run, every_s)
        _follow(run, console, every_s)


def _read_facts(folder: Path) -> RunFacts:
    from gpumix.report.facts import RunFacts
    from gpumix.report.run import read_run

    return RunFacts(read_run(folder, newest_bytes=NEWEST_BYTES))


def _wait_for_plan(folder: Path, every_s: float) -> None:
    """Wait while a run measures devices, until it has a plan or has ended."""
    from gpumix.report.run import is_measuring
    from gpumix.train.console.terminal import show_waiting

    with show_waiting(MEASURING):
        while is_measuring(folder):
            time.sleep(every_s)


def _follow(folder: Path, console: Console, every_s: float) -> None:
    """Show frame after frame until the run has ended."""
    from contextlib import suppress

    from rich.live import Live

    from gpumix.report.live import render_frame

    facts = _read_facts(folder)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        settled = False
        while True:
            shown = render_frame(facts, width=console.width, height=console.height)
            live.update(shown, refresh=True)
            may_go_on = facts.run.progress.state in ("failed", "interrupted")
            if has_ended(facts.run) and (settled or not may_go_on):
                return
            settled = may_go_on
            time.sleep(RESTART_WAIT_S if may_go_on else every_s)
            facts = _read_facts(folder)


def has_ended(run: Run) -> bool:
    """Return True for a run that has ended, or is silent for too long."""
    progress = run.progress
    if not progress.live:
        return True
    job = run.record.job if run.record is not None else {}
    advanced = job.get("advanced")
    timeout = advanced.get("timeout") if isinstance(advanced, dict) else None
    timeout_s = timeout if isinstance(timeout, int | float) else TIMEOUT_S
    return progress.silent_s() > max(
        SILENT_TIMEOUTS * timeout_s, SILENT_STEPS * (run.figures.step_s or 0.0)
    )
