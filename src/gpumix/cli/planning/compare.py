"""`gpumix compare`: all strategies side by side. Pure planning: never imports torch."""

from __future__ import annotations

import typer

from gpumix.cli.common import Json, make_command, print_result
from gpumix.cli.planning.profile_source import PlanOptions, add_planning_options
from gpumix.schema.reading.error_location import locate_errors


def register(app: typer.Typer) -> None:
    app.command(
        help="Plan with every strategy, and say why the slower ones lost.\n\n"
        "Example: gpumix compare job.yaml\n\n"
        'Example: gpumix compare --cluster "4x rtx3090, 2x p40" --model 1B'
    )(compare)


@make_command
@add_planning_options
def compare(asked: PlanOptions, as_json: Json = False) -> None:
    from gpumix.cli.planning.tables import comparison_page
    from gpumix.planner.compare import compare as compared
    from gpumix.train.console.terminal import show_waiting

    source = asked.source()
    with locate_errors(source.place), show_waiting("comparing strategies"):
        found = compared(source.profile, source.request)
    print_result(
        lambda: found.model_dump(mode="json"),
        lambda: comparison_page(found, source.note),
        as_json,
    )
