"""`gpumix plan`: who computes what and who stores what. Decides, so it never imports torch."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import Debug, JobFile, Json, Overrides, print_json, verb
from gpumix.spec.errors import InputError

if TYPE_CHECKING:
    from gpumix.spec.cluster import Cluster
    from gpumix.spec.job import Job
    from gpumix.spec.profile import Profile


def register(app: typer.Typer) -> None:
    app.command(
        help="Plan a job; measures first what is not in the cache.\n\n"
        "Example: gpumix plan job.yaml --strategy even --output plan.json"
    )(plan)


@verb
def plan(
    job: JobFile,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Plan from this profile.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="optimal or even; default: the job's.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    from gpumix.planner.explain import check_strategy
    from gpumix.planner.explain import plan as make_plan
    from gpumix.spec.profile import Profile
    from gpumix.spec.read import read_job
    from gpumix.train.tables import plan_table, stderr

    read = read_job(job, overrides)
    if strategy is not None:
        check_strategy(strategy)
    if profile is not None:
        measured = Profile.load(profile)
        _check_profile(measured, read, profile)
    else:
        measured = _measured(job, read, overrides, as_json=as_json)
    made = make_plan(measured, read.global_batch, strategy or read.strategy)
    if output is not None:
        made.save(output)
    if as_json:
        print_json(made.model_dump(mode="json"))
    else:
        stderr().print(plan_table(made))


def _check_profile(profile: Profile, job: Job, path: Path) -> None:
    """What is planned must be what is trained; the model itself is compared when it is built."""
    fix = "measure this job: gpumix profile JOB.yaml --output PROFILE.json"
    for what, measured, wanted in (
        ("sequence_length", profile.sequence_length, job.sequence_length),
        ("precision", profile.compute_dtype, job.precision),
        (
            "bytes of optimizer state an element",
            profile.optimizer_bytes_per_element,
            job.optimizer.state_bytes_per_element,
        ),
    ):
        if measured != wanted:
            raise InputError(
                f"the profile is of {what} {measured}, the job has {wanted}",
                where=str(path),
                fix=fix,
            )
    if job.cluster not in ("auto", profile.cluster):
        raise InputError(
            "the profile is of another cluster than the job's", where=str(path), fix=fix
        )


def _measured(path: Path, job: Job, overrides: list[str], *, as_json: bool) -> Profile:
    """The profile from the cache; another process measures what is missing there."""
    from gpumix.spec.profile import Profile

    found = cached_profile(path, job)
    if found is not None:
        return found
    sets = [part for override in overrides for part in ("--set", override)]
    # -P: modules are looked for beside the job, as everywhere, not in the current folder.
    command = [sys.executable, "-P", "-m", "gpumix", "profile", str(path), "--json", *sets]
    with _ended_by_sigterm():
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        if as_json:  # its error
            sys.stdout.write(done.stdout)
        raise typer.Exit(done.returncode)
    return Profile.model_validate_json(done.stdout)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """What ends this process ends the one that it waits for too."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def cached_profile(path: Path, job: Job) -> Profile | None:
    """What was measured of the model of the job file at `path`, on its cluster; None if some of it
    was not."""
    from gpumix.hardware.discover import discover
    from gpumix.profiler.cache import MeasurementCache

    cluster: Cluster = discover() if job.cluster == "auto" else job.cluster
    return MeasurementCache(job, cluster, path.absolute().parent).load()
