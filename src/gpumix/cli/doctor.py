"""`gpumix doctor`: what slows a job down, measured, and the setting that mends it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import Debug, JobFile, Json, Overrides, print_json, verb

if TYPE_CHECKING:
    from rich.table import Table

    from gpumix.doctor.examine import Report


def register(app: typer.Typer) -> None:
    app.command(
        help="Find what slows a job down: run a few steps, try what may mend it, and say by how "
        "much.\n\n"
        "Each change is measured on this job, in windows of a few steps with and without it that "
        "run in turn.\n\n"
        "Example: gpumix doctor job.yaml --apply"
    )(doctor)


@verb
def doctor(
    job: JobFile,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Write the job with all that helped, as JOB.tuned.yaml."),
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Steps of a window.")] = 12,
    pairs: Annotated[
        int, typer.Option("--pairs", min=3, help="Windows with and without each change.")
    ] = 5,
    only: Annotated[
        list[str], typer.Option("--only", metavar="NAME", help="Try this suspect only.")
    ] = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    from gpumix.doctor.change import write_tuned
    from gpumix.doctor.examine import examine
    from gpumix.train.tables import stderr

    console = stderr()
    report = examine(
        job,
        tuple(overrides),
        say=console.print,
        steps=steps,
        pairs=pairs,
        only=tuple(only),
        debug=debug,
    )
    if as_json:
        print_json(report.as_dict())
    else:
        console.print(_table(report) if report.findings else "nothing was found that slows it down")
        for remark in report.remarks:
            console.print(remark)
    if apply and report.findings:
        tuned = tuned_path(job)
        write_tuned(job, tuned, report.changes)
        console.print(f"the job with these changes: {tuned}")


def _table(report: Report) -> Table:
    from rich.table import Table

    from gpumix.doctor.change import in_words

    table = Table("finding", "why", "change", "gain", title=f"{report.gain:.2f} times as fast")
    for one in report.findings:
        table.add_row(one.what, one.why, in_words(one.changes), str(one.gain))
    return table


def tuned_path(job: Path) -> Path:
    """Where `--apply` writes."""
    return job.with_name(f"{job.stem}.tuned.yaml")
