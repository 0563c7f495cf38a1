"""`gpumix train`: detect, profile, plan, show, train."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpumix.cli.common import (
    Allowed,
    JobFile,
    Json,
    Overrides,
    Strategy,
    make_command,
    print_json,
    shows_tracebacks,
    take_cluster_file,
)
from gpumix.schema.errors import InputError
from gpumix.schema.reading.error_location import locate_errors


def register(app: typer.Typer) -> None:
    app.command(
        help="Train a job: detect the devices, profile, plan, show, train.\n\n"
        "Starts one process per device on this host; for several hosts see gpumix launch, or start "
        "it with torchrun.\n\n"
        "Several hosts: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend gpumix "
        "--rdzv-endpoint host-a:29500 -m gpumix train job.yaml\n\n"
        "Example: gpumix train job.yaml --set max_steps=1000 --resume\n\n"
        "Example: gpumix train job.yaml --strategy model"
    )(train)


@make_command
@take_cluster_file
def train(
    job: JobFile,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Train by this plan, made or edited; nothing is profiled or planned. The job's "
            "strategy and techniques have no effect then.",
        ),
    ] = None,
    strategy: Strategy = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the job.")
    ] = False,
    trace: Annotated[
        int | None,
        typer.Option(
            "--trace-step",
            min=1,
            metavar="STEP",
            help="Write a trace of this step into the run's folder, for ui.perfetto.dev.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    allowed: Allowed = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    from gpumix.cli.planning.profile_source import load_profile_beside
    from gpumix.schema.plan.plan import Plan
    from gpumix.train.controller import JobController

    if plan is not None and strategy is not None:
        raise InputError(
            "a plan is given, and a strategy to make one by",
            where="--plan and --strategy",
            fix="give one of the two",
        )
    given = Plan.load(plan) if plan is not None else None
    if strategy is not None:
        overrides = [*overrides, f"strategy={strategy}"]
    if trace is not None:
        overrides = [*overrides, f"advanced.trace_step={trace}"]
    found = load_profile_beside(plan, given) if plan is not None and given is not None else None
    made_from, made_from_file = found or (None, "")
    with locate_errors(job):
        pipeline = JobController.of_file(job, overrides, allowed=allowed, debug=shows_tracebacks())
        summary = pipeline.train(
            given,
            resume=resume,
            made_from=made_from,
            plan_file=str(plan or ""),
            made_from_file=str(made_from_file),
        )
    if not pipeline.speaks:
        return
    pipeline.show_summary(summary)
    if as_json:
        print_json(asdict(summary))
