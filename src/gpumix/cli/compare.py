"""`gpumix compare`: all strategies side by side. Decides, so it never imports torch."""

from __future__ import annotations

import typer

from gpumix.cli.common import Debug, Json, Overrides, print_json, verb
from gpumix.cli.source import (
    AnyJob,
    Asked,
    Batch,
    ClusterText,
    Length,
    ModelText,
    NetworkText,
    ProfileFile,
    Techniques,
)


def register(app: typer.Typer) -> None:
    app.command(
        help="Plan with every strategy, and tell why each one but the fastest lost.\n\n"
        "Example: gpumix compare job.yaml\n\n"
        'Example: gpumix compare --cluster "4x rtx3090, 2x p40" --model 1B'
    )(compare)


@verb
def compare(
    job: AnyJob = None,
    profile: ProfileFile = None,
    cluster: ClusterText = None,
    network: NetworkText = None,
    model: ModelText = None,
    sequence_length: Length = None,
    global_batch: Batch = None,
    techniques: Techniques = "engine",
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    from gpumix.cli.tables import comparison_table
    from gpumix.planner.compare import compare as compared
    from gpumix.train.tables import stderr

    source = Asked(
        job,
        overrides,
        profile=profile,
        cluster=cluster,
        network=network,
        model=model,
        sequence_length=sequence_length,
        global_batch=global_batch,
        techniques=techniques,
        as_json=as_json,
    ).source()
    found = compared(source.profile, source.request)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    if source.note:
        stderr().print(source.note, style="yellow")
    stderr().print(comparison_table(found))
