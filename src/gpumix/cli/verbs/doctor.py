"""`gpumix doctor`: causes of slow training, measured, and remedies."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import (
    OF_CLUSTER,
    Allowed,
    Json,
    Overrides,
    print_json,
    shows_tracebacks,
    take_shorthands,
)
from gpumix.schema.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from gpumix.doctor.examine import Patient
    from gpumix.doctor.report import Report


@take_shorthands(OF_CLUSTER)
def doctor(
    target: Annotated[
        str,
        typer.Argument(metavar="JOB|MODULE:FUNCTION", help="The job, a YAML file; or a function."),
    ],
    apply: Annotated[
        bool,
        typer.Option(
            "--apply", help="Write the job with all changes that helped, as JOB.tuned.yaml."
        ),
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Steps of a run.")] = 12,
    pairs: Annotated[
        int, typer.Option("--pairs", min=3, help="Pairs of runs, with and without each change.")
    ] = 5,
    only: Annotated[
        list[str],
        typer.Option("--only", metavar="NAME", help="Test this suspect only; may be repeated."),
    ] = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    allowed: Allowed = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Find what slows down a job, or a training function of yours: run a few steps, test each
    change, and report its gain.

    This takes minutes: the job runs several times, a few steps each. Each change is measured in
    pairs of short runs, with and without it; problems that no change fixes are reported without a
    gain. A function is from your own script, in plain PyTorch, whose module is in this folder. It
    really runs, without arguments and several times, and is stopped after some steps each time: it
    writes its files and logs.

    Example: gpumix doctor job.yaml --apply
    Example: gpumix doctor train:main
    """
    begun_s = time.perf_counter()
    _refuse_a_script(target)
    is_function = _is_function(target)
    if is_function:
        _refuse_job_options(target, apply=apply, overrides=overrides)
        _require_module(target.partition(":")[0])
    from gpumix.doctor.examine import examine
    from gpumix.train.console.terminal import (
        get_result_console,
        get_stderr_console,
        show_waiting,
    )

    _refuse_unknown_suspects(only, is_function)
    progress = get_stderr_console()
    results = progress if as_json else get_result_console()
    if is_function:
        progress.print(
            f"{target} runs several times, a few steps each, and writes its files each time"
        )
    opened = _open_patient(target, is_function, overrides, allowed, steps=steps)
    with ExitStack() as held:
        with show_waiting("starting"):  # imports torch
            patient = held.enter_context(opened)
        report = examine(
            patient, say=progress.print, pairs=pairs, only=tuple(only), begun_s=begun_s
        )
    if as_json:
        print_json(report.as_dict())
    else:
        results.print(_render_findings(report) if report.findings else _describe_no_gain(report))
        for remark in report.remarks:
            results.print(remark.text)
        for name in report.untried:
            results.print(f"not tried, for that takes minutes: --only {name}")
    if apply:
        for line in _apply_changes(Path(target), report, overrides):
            results.print(line)


def _apply_changes(job: Path, report: Report, overrides: Sequence[str]) -> Iterator[str]:
    """Write the job with all changes that helped; return lines that say so."""
    from gpumix.doctor.change import merge_overrides, write_tuned

    if report.settings:
        tuned = get_tuned_path(job)
        again = merge_overrides(overrides, report.settings)
        given = " ".join(f"--set {quote(one)}" for one in again)
        with_these = [f"measured with {given}, which is not written here"] if given else []
        write_tuned(job, tuned, report.settings, [*report.notes, *with_these])
        told = f"; what --set gave is not in it: gpumix train {quote(str(tuned))} {given}"
        yield f"the job with these changes: {tuned}{told if given else ''}"
    for one in report.left:
        yield f"left to you: {one}"


def _require_module(name: str) -> None:
    """Raise InputError if there is no such module, before anything else is imported."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = find_spec(name)
    except ImportError:
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise InputError(
            f"there is no module '{name}'",
            code="module-missing",
            where=str(Path.cwd()),
            fix="modules are looked for in the current folder and among installed packages",
        )


def _is_function(target: str) -> bool:
    from gpumix.schema.job.job import FACTORY

    return re.match(FACTORY, target) is not None and not Path(target).exists()


def _refuse_a_script(target: str) -> None:
    if target.endswith(".py"):
        name = Path(target).stem
        raise InputError(
            f"'{target}' is a script, and what is examined is a function",
            code="doctor-of-script",
            fix=f"in the folder of {name}.py name the one that trains: gpumix doctor {name}:main",
        )


def _refuse_job_options(target: str, *, apply: bool, overrides: list[str]) -> None:
    if apply:
        raise InputError(
            f"--apply is for jobs, '{target}' is a function",
            code="apply-without-job",
            why="code is not rewritten",
            fix="leave --apply out: the report has the lines to change, --json all of it",
        )
    if overrides:
        raise InputError(
            f"--set is for jobs, '{target}' is a function",
            code="set-without-job",
            fix="leave --set out",
        )


def _refuse_unknown_suspects(only: list[str], is_function: bool) -> None:
    from gpumix.doctor import suspects as of_jobs
    from gpumix.doctor.function import suspects as of_functions

    names = of_functions.NAMES if is_function else of_jobs.NAMES
    for name in only:
        if name not in names:
            raise InputError(
                f"there is no suspect '{name}'",
                code="suspect-unknown",
                where="--only",
                fix=f"of {'functions' if is_function else 'jobs'} there are {', '.join(names)}",
            )


@contextmanager
def _open_patient(
    target: str,
    is_function: bool,
    overrides: list[str],
    allowed: list[str],
    *,
    steps: int,
) -> Iterator[Patient]:
    from gpumix.doctor.function.function_patient import open_function_patient
    from gpumix.doctor.job import open_job_patient

    if is_function:
        with open_function_patient(
            target, Path.cwd(), steps=steps, debug=shows_tracebacks()
        ) as function:
            yield function
    else:
        with open_job_patient(
            Path(target),
            tuple(overrides),
            steps=steps,
            allowed=tuple(allowed),
            debug=shows_tracebacks(),
        ) as job:
            yield job


def _render_findings(report: Report) -> Text:
    """Return what helps, in all and each, with the reason and the change."""
    from gpumix.train.console.text_page import iterate_labelled, join_lines, wrap_line

    waited = f"{report.input_share:.0%} of a step was spent waiting for data"
    lines = [(f"{report.gain:.2f}x as fast with all of this; {waited}", "bold green")]
    for one in report.findings:
        suspect = one.suspect
        lines += [("", ""), *((text, "bold") for text in wrap_line(suspect.what))]
        for label, text in (
            ("gain", str(one.gain)),
            ("why", suspect.why),
            ("change", suspect.change_text),
        ):
            lines += iterate_labelled(f"  {label}", text)
    return join_lines(lines)


def _describe_no_gain(report: Report) -> str:
    """Describe a report without helpful changes."""
    if report.remarks:
        return "no change was found that makes it faster"
    return "nothing was found that slows it down"


def get_tuned_path(job: Path) -> Path:
    """Return the path written by `--apply`."""
    return job.with_name(f"{job.stem}.tuned.yaml")
