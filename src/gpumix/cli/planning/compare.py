"""`gpumix compare`: all strategies side by side. Pure planning: never imports torch."""

from __future__ import annotations

from gpumix.cli.common import Json, print_result
from gpumix.cli.planning.profile_source import PlanOptions, add_planning_options
from gpumix.schema.reading.error_location import locate_errors


@add_planning_options
def compare(asked: PlanOptions, as_json: Json = False) -> None:
    """Plan with every strategy, and say why the slower ones lost.

    Example: gpumix compare job.yaml
    Example: gpumix compare --cluster "4x rtx3090, 2x p40" --model 1B
    """
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
