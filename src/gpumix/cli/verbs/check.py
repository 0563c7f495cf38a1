"""`gpumix check`: test in less than a minute whether a cluster is fit for a run, with fixes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import (
    OF_CLUSTER,
    Allowed,
    Json,
    Overrides,
    print_result,
    refuse_set_without_job,
    shows_tracebacks,
    take_shorthands,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumix.check.finding import Finding

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


@take_shorthands(OF_CLUSTER)
def check(
    context: typer.Context,
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Also test the needs of this job.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    allowed: Allowed = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Test a cluster before a run, in less than a minute: one line per problem, with the fix.

    Versions, drivers, kernels, GPUs, pairs of devices and hosts, clocks, disks, memory, limits;
    with a job also its packages, model and data. Without a job, the devices of this host. Nothing
    is left behind.

    Several hosts: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend gpumix --rdzv-endpoint
    host-a:29500 -m gpumix check job.yaml

    Exits with 3 if there is an error, with 0 if there are only warnings and notes.

    Example: gpumix check job.yaml
    """
    from gpumix.check.run import check as outcome_of
    from gpumix.schema.errors import MachineError
    from gpumix.train.console.terminal import get_stderr_console

    refuse_set_without_job(job, overrides, fix="gpumix check JOB.yaml --set ...")
    leaving = context.with_resource(ExitStack())
    say = get_stderr_console().print
    outcome = outcome_of(
        job, overrides, allowed=allowed, say=say, leaving=leaving, debug=shows_tracebacks()
    )
    findings = outcome.findings
    if findings is not None:
        print_result(
            lambda: [one.model_dump(mode="json") for one in findings],
            lambda: _render_findings(findings),
            as_json,
        )
    if outcome.failed:
        raise typer.Exit(MachineError.exit_code)


def _render_findings(findings: Sequence[Finding]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from gpumix.check.finding import format_findings

    return Group(
        *(
            Text.assemble((f"{severity.value:<8}", STYLES[severity.value]), line)
            for severity, line in format_findings(findings)
        )
    )
