"""`gpumix profile`: speed of each device class at this job's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumix.cli.common import (
    OF_CLUSTER,
    Allowed,
    JobFile,
    Json,
    Overrides,
    print_json,
    shows_tracebacks,
    take_shorthands,
)
from gpumix.schema.reading.error_location import locate_errors

Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again, also what is in the cache.")]


@take_shorthands(OF_CLUSTER)
def profile(
    job: JobFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profile here.")
    ] = None,
    fresh: Fresh = False,
    overrides: Overrides = [],  # noqa: B006
    allowed: Allowed = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Measure compute, memory and network for a job's model; results are cached.

    Example: gpumix profile job.yaml --output profile.json
    """
    from gpumix.train.console.terminal import show_waiting

    with show_waiting("starting"):
        from gpumix.train.console.tables import efficiency_table, profile_table
        from gpumix.train.controller import JobController

    with locate_errors(job):
        with show_waiting("reading the job"):
            pipeline = JobController.of_file(
                job, overrides, allowed=allowed, debug=shows_tracebacks()
            )
        found = pipeline.profile(fresh=fresh)
    if not pipeline.speaks:
        return
    if output is not None:
        found.save(output)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        pipeline.show(profile_table(found))
        pipeline.show(efficiency_table(found))
