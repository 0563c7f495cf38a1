"""`gpumix devices`: the devices to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumix.cli.common import (
    Json,
    Overrides,
    print_result,
    refuse_set_without_job,
)


def devices(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Take the cluster of this job.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help='Take this cluster file, or cards: "2x rtx4090, p40".'),
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", help="The link between the hosts of cards: 25GbE.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show the devices of this host, or of a job or cluster file.

    Example: gpumix devices --json
    """
    from gpumix.cli.planning.estimate_source import NamedCluster
    from gpumix.hardware.discovery.discover import discover_cluster
    from gpumix.schema.errors import InputError
    from gpumix.schema.reading.read import read_job
    from gpumix.train.console.devices_page import devices_page

    if job is not None and cluster is not None:
        raise InputError(
            "a job and --cluster both name devices",
            code="job-and-cluster",
            where=f"{job}, {cluster}",
            fix="give one of them",
        )
    refuse_set_without_job(
        job, overrides, fix="gpumix devices JOB.yaml --set ..., or gpumix devices --cluster FILE"
    )
    wanted, described = None, NamedCluster(cluster, network)
    if cluster is not None:
        wanted = described.describe()
    else:
        described.refuse_network()
    if job is not None:
        named = read_job(job, overrides).cluster
        wanted = None if named == "auto" else named
    found = wanted or discover_cluster()
    print_result(lambda: found.model_dump(mode="json"), lambda: devices_page(found), as_json)
