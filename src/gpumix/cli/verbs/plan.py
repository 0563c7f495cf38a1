"""`gpumix plan`: division of compute and storage. Pure planning: never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumix.cli.common import Json, Strategy, make_command, print_result
from gpumix.cli.profile_source import PlanOptions, add_planning_options, get_profile_path
from gpumix.schema.reading.error_location import locate_errors


def register(app: typer.Typer) -> None:
    app.command(
        help="Plan a job; measures first what is not in the cache.\n\n"
        "Example: gpumix plan job.yaml --strategy even --output plan.json\n\n"
        'Example: gpumix plan --cluster "4x rtx3090, 2x p40" --model 3B'
    )(plan)


@make_command
@add_planning_options
def plan(
    asked: PlanOptions,
    strategy: Strategy = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the plan here, and beside it what it was made from."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    from rich.console import Group

    from gpumix.planner.plan import check_strategy
    from gpumix.planner.plan import plan as make_plan
    from gpumix.train.run_log.tables import efficiency_table, plan_table

    if strategy is not None:
        check_strategy(strategy)
    source = asked.source(strategy)
    with locate_errors(source.place):
        made = make_plan(
            source.profile,
            source.request.global_batch,
            strategy=source.strategy,
            space=source.request.space,
        )
    if output is not None:
        made.save(output)
        source.profile.save(get_profile_path(output))
    print_result(
        lambda: made.model_dump(mode="json"),
        lambda: Group(efficiency_table(source.profile), plan_table(made)),
        as_json,
        source.note,
    )
