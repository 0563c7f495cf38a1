"""`gpumix devices`: the devices to train on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import (
    Json,
    Overrides,
    make_command,
    print_result,
    refuse_set_without_job,
)

if TYPE_CHECKING:
    from gpumix.schema.cluster.cluster import Cluster


def register(app: typer.Typer) -> None:
    app.command(
        help="Show the devices of this host, or of a job or cluster file.\n\n"
        "Example: gpumix devices --json"
    )(devices)


@make_command
def devices(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Take the cluster of this job.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help='Take this cluster file, or cards: "2x rtx4090, p40".'),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    from gpumix.hardware.discovery.discover import discover_cluster
    from gpumix.schema.errors import InputError
    from gpumix.schema.reading.read import read_job
    from gpumix.train.run_log.tables import devices_table

    if job is not None and cluster is not None:
        raise InputError("give a job or --cluster, not both", where=f"{job}, {cluster}")
    refuse_set_without_job(
        job, overrides, fix="gpumix devices JOB.yaml --set ..., or gpumix devices --cluster FILE"
    )
    wanted = None
    if cluster is not None:
        wanted = _read(cluster)
    elif job is not None:
        named = read_job(job, overrides).cluster
        wanted = None if named == "auto" else named
    found = wanted or discover_cluster()
    print_result(lambda: found.model_dump(mode="json"), lambda: devices_table(found), as_json)


def _read(cluster: str) -> Cluster:
    """Return the cluster of a file, or of names of cards."""
    from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
    from gpumix.schema.reading.read import read_cluster

    if os.path.isfile(cluster) or cluster.endswith((".yaml", ".yml", ".json")):  # noqa: PTH113
        return read_cluster(Path(cluster))
    return parse_cluster(cluster, network="10GbE" if ";" in cluster else None)
