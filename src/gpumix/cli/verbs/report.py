"""`gpumix report`: a run, or two, as a page readable offline. Reads files; never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpumix.cli.common import Json, print_json

if TYPE_CHECKING:
    from gpumix.report.run import Run


RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of the run, or a script's output folder."),
]


def report(
    run: RunFolder,
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A second run, to compare.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the page here; default: into the run's folder."),
    ] = None,
    shown: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser of this machine.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a run as one page that opens offline: what to do next, how fast, who does what, and
    why. With a second run, write a page that compares both, and print the differences.

    The run may be running, ended, failed, or only planned; its files are not changed.

    Example: gpumix report runs/first --open
    Example: gpumix report runs/first runs/second
    """
    from gpumix.report.run import read_run
    from gpumix.train.console.terminal import get_stderr_console

    found = read_run(run)
    if other is None:
        path, told = _write_one(found, output)
    else:
        path, told = _write_both(found, read_run(other), output, prints=not as_json)
    if as_json:
        print_json(told | {"report": str(path)})
    else:
        if other is None:
            _print_summary(found)
        get_stderr_console().print(f"report: {path}")
    if shown:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            get_stderr_console().print("no browser was found here: open that file in one")


def _print_summary(run: Run) -> None:
    """Print a run as `gpumix top --once` does."""
    from gpumix.report.facts import RunFacts
    from gpumix.report.live import render_frame
    from gpumix.train.console.terminal import get_stdout_console

    console = get_stdout_console()
    console.print(render_frame(RunFacts(run), width=console.width))


def _write_one(run: Run, output: Path | None) -> tuple[Path, dict[str, Any]]:
    """Write a run's page; return its path and numbers."""
    from gpumix.report.facts import RunFacts
    from gpumix.report.page import write_page
    from gpumix.train.run_log import run_files

    path = output or run.folder / run_files.REPORT
    write_page(run, path)
    _warn_of_unread_lines(run)
    return path, RunFacts(run).as_dict()


def _write_both(
    first: Run, second: Run, output: Path | None, *, prints: bool
) -> tuple[Path, dict[str, Any]]:
    """Write the page of two runs, and print their differences."""
    from gpumix.report.comparison import compare_runs
    from gpumix.report.comparison_page import render_comparison
    from gpumix.report.page import write_document
    from gpumix.train.console.terminal import get_result_console
    from gpumix.train.run_log import run_files

    path = output or first.folder / run_files.COMPARISON
    found = compare_runs(first, second)
    write_document(render_comparison(found), path)
    for run in (first, second):
        _warn_of_unread_lines(run)
    if prints:
        for line in found.lines():
            get_result_console().print(line)
    return path, found.as_dict()


def _warn_of_unread_lines(run: Run) -> None:
    from gpumix.train.console.terminal import get_stderr_console

    if unread := run.history.unread_note:
        get_stderr_console().print(f"{unread}: the page does without them", style="yellow")
