"""`gpumix report`: a run as a page readable offline. Reads files; never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumix.cli.common import Json, make_command, print_json


def register(app: typer.Typer) -> None:
    app.command(
        help="Write a run as one page that opens offline: how fast, who does what, and why.\n\n"
        "Of a run that is under way, ended, failed, or only planned; nothing of it is changed.\n\n"
        "Example: gpumix report runs/first --open"
    )(report)


RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The run's folder, or the one that a script writes to."),
]


@make_command
def report(
    run: RunFolder,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the page here; default: into the run's folder."),
    ] = None,
    shown: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser of this machine.")
    ] = False,
    as_json: Json = False,
) -> None:
    from gpumix.report.facts import RunFacts
    from gpumix.report.page import write_page
    from gpumix.report.run import read_run
    from gpumix.train.run_log import run_files
    from gpumix.train.run_log.terminal import get_stderr_console

    found = read_run(run)
    path = output or found.folder / run_files.REPORT
    write_page(found, path)
    if unread := found.history.unread_note:
        get_stderr_console().print(f"{unread}: the page goes by the others", style="yellow")
    if as_json:
        print_json(RunFacts(found).as_dict() | {"report": str(path)})
    else:
        get_stderr_console().print(f"report: {path}")
    if shown:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            get_stderr_console().print("no browser was found here: open that file in one")
