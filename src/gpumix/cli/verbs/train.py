"""`gpumix train`: detect, profile, plan, show, train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import (
    OF_CLUSTER,
    OF_STRATEGY,
    OF_TRACE_STEP,
    Allowed,
    DryRun,
    JobFile,
    Json,
    Overrides,
    print_json,
    print_result,
    shows_tracebacks,
    take_shorthands,
)
from gpumix.schema.errors import InputError
from gpumix.schema.reading.error_location import locate_errors

if TYPE_CHECKING:
    from gpumix.train.controller import UserPlan


@take_shorthands(OF_CLUSTER, OF_STRATEGY, OF_TRACE_STEP)
def train(
    job: JobFile,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Train by this plan, perhaps edited; nothing is measured or planned. The job's "
            "strategy and techniques have no effect.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint of the job.")
    ] = False,
    dry_run: DryRun = False,
    overrides: Overrides = [],  # noqa: B006
    allowed: Allowed = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Train a job: detect the devices, profile, plan, show, train.

    Starts one process per device on this host; for several hosts see gpumix launch, or start it
    with torchrun.

    With --dry-run, the job, its files, model, data, devices and plan are checked as for a start.
    Nothing is measured: without a profile in the cache, the plan is an estimate from datasheets, if
    they know the GPUs. Factories of the job are called.

    Several hosts: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend gpumix --rdzv-endpoint
    host-a:29500 -m gpumix train job.yaml

    Example: gpumix train job.yaml --set max_steps=1000 --resume
    Example: gpumix train job.yaml --dry-run
    """
    given = _load_given_plan(plan, overrides)
    if dry_run:
        from gpumix.cli.planning.dry_run import check_job, render_start

        start = check_job(job, overrides, allowed, given, resume=resume)
        print_result(start.as_dict, lambda: render_start(start), as_json)
        return
    from gpumix.train.console.terminal import show_waiting

    with show_waiting("starting"):
        from gpumix.train.controller import JobController

    with locate_errors(job):
        with show_waiting("reading the job"):
            pipeline = JobController.of_file(
                job, overrides, allowed=allowed, debug=shows_tracebacks()
            )
        summary = pipeline.train(given, resume=resume)
    if not pipeline.speaks:
        return
    pipeline.show_summary(summary)
    if as_json:
        print_json(asdict(summary))


def _load_given_plan(path: Path | None, overrides: Sequence[str]) -> UserPlan:
    """Load the plan to train by and the profile next to it."""
    from gpumix.cli.planning.profile_source import load_profile_beside
    from gpumix.schema.plan.plan import Plan
    from gpumix.train.controller import UserPlan

    if path is None:
        return UserPlan()
    if any(one.startswith("strategy=") for one in overrides):
        raise InputError(
            "a plan is given, and a strategy to make one by",
            code="plan-and-strategy",
            where="--plan and --strategy",
            fix="give one of the two",
        )
    plan = Plan.load(path)
    made_from, file = load_profile_beside(path, plan) or (None, "")
    return UserPlan(plan, made_from, str(path), str(file))
