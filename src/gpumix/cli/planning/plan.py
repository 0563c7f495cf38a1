"""`gpumix plan`: division of compute and storage. Pure planning: never imports torch."""

from __future__ import annotations

from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import (
    Json,
    Strategy,
    is_cluster_file,
    print_json,
    print_result,
)
from gpumix.cli.planning.profile_source import (
    PlanOptions,
    PlanSource,
    add_planning_options,
    get_profile_path,
)
from gpumix.schema.errors import LoadingMemoryError, NoFeasiblePlanError
from gpumix.schema.reading.error_location import locate_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumix.schema.plan.plan import Plan


@add_planning_options
def plan(
    asked: PlanOptions,
    strategy: Strategy = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan here, and its profile next to it."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every device, bounds and alternatives.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tell whether a model fits, its speed, and the work and memory of each GPU.

    With a job, its model is measured first, unless the cache has it.

    Example: gpumix plan --cluster "2x rtx4090, 4x rtx3090" --model 7B
    Example: gpumix plan job.yaml --strategy even --output plan.json
    """
    from gpumix.planner.eight_bit_state import match_profile, plan_with_allowed
    from gpumix.planner.plan import check_strategy
    from gpumix.train.console.terminal import show_waiting

    if strategy is not None:
        check_strategy(strategy)
    source = asked.source(strategy)
    try:
        with locate_errors(source.place), show_waiting("searching plans"):
            made = plan_with_allowed(
                source.profile,
                source.request.global_batch,
                strategy=source.strategy,
                space=source.request.space,
                allow=source.allow,
                detailed=verbose or as_json or output is not None,
            )
    except NoFeasiblePlanError as error:
        without = source.estimate is None or source.strategy != "optimal"
        if without or isinstance(error, LoadingMemoryError):
            raise
        _print_shortfall(source, error, as_json)
        raise typer.Exit(error.exit_code) from None
    if output is not None:
        made.save(output)
        match_profile(source.profile, made).save(get_profile_path(output))
    next_commands = (
        _next_commands(source) if asked.job is None else _next_for_job(asked, strategy, output)
    )
    print_result(
        lambda: made.model_dump(mode="json"),
        lambda: _render(source, made, next_commands, verbose=verbose),
        as_json,
    )


def _render(
    source: PlanSource,
    made: Plan,
    next_commands: list[tuple[str, str]],
    *,
    verbose: bool,
) -> RenderableType:
    from rich.console import Group

    from gpumix.train.console.plan_page import describe_doubt, plan_page
    from gpumix.train.console.tables import efficiency_table, plan_table

    page = plan_page(
        made,
        doubt=describe_doubt(source.profile),
        assumed=source.note,
        steps=source.steps,
        next_commands=next_commands,
    )
    if not verbose:
        return page
    return Group(page, "", efficiency_table(source.profile), plan_table(made))


def _next_for_job(
    asked: PlanOptions, strategy: str | None, output: Path | None
) -> list[tuple[str, str]]:
    """Return the commands that come next for a job, with what was given to this one. Cards that
    are only named cannot train."""
    from gpumix.hardware.host.environment import allowed_by_environment
    from gpumix.schema.reading.overrides import name_job, parse_key

    assert asked.job is not None
    is_estimate = asked.cluster is not None and not is_cluster_file(asked.cluster)
    others = [join(["--cluster", asked.cluster])] if asked.cluster is not None else []
    always = allowed_by_environment()
    others += [join(["--allow", name]) for name in asked.allowed if name not in always]
    trained = [asked.job_arguments, *others]
    planned = [*trained]
    planned += [join(["--network", asked.network])] if asked.network is not None else []
    planned += [join(["--profile", str(asked.profile)])] if asked.profile is not None else []
    chosen = [join(["--strategy", strategy])] if strategy is not None else []
    commands: list[tuple[list[str], str]] = []
    if not is_estimate:
        told = "train by this plan"
        kept = output or (Path("plan.json") if asked.profile is not None else None)
        if kept is None:
            commands.append((["gpumix train", *trained, *chosen], told))
        else:
            file = quote(str(kept))
            if output is None:
                keep = ["gpumix plan", *planned, *chosen, "--output", file]
                commands.append((keep, "write this plan"))
            # A plan has its strategy.
            sets = [one for one in asked.overrides if parse_key(one) != "strategy"]
            job = name_job(asked.job, sets)
            commands.append((["gpumix train", job, *others, "--plan", file], told))
    commands += [
        (["gpumix compare", *planned], "what other strategies would give"),
        (["gpumix plan", *planned, *chosen, "--verbose"], "bounds, alternatives, every device"),
    ]
    return [(" ".join(words), told) for words, told in commands]


def _next_commands(source: PlanSource) -> list[tuple[str, str]]:
    """Return two to four commands that come next without a job, each with what it tells. "…" stands
    for the arguments of this one."""
    most = max(source.profile.cluster.classes, key=lambda c: c.memory_bytes).name
    commands = [("gpumix compare …", "what FSDP-like and other splits give")]
    if source.estimate is not None and source.estimate.tuning.base == "16bit":
        if source.estimate.tuning.trains_all:
            commands.append(("gpumix plan … --lora 16", "adapters only: far less memory"))
        else:
            commands.append(("gpumix plan … --base nf4", "a 4-bit base: the least memory"))
    commands.append((f"gpumix whatif … --add {most}", "what one more GPU is worth"))
    return commands


def _print_shortfall(source: PlanSource, error: NoFeasiblePlanError, as_json: bool) -> None:
    """Print what is short, and the remedies, on stdout."""
    from gpumix.cli.planning.remedies import find_remedies, shortfall_page
    from gpumix.train.console.terminal import get_result_console, show_waiting

    assert source.estimate is not None
    with show_waiting("looking for remedies"):
        found = find_remedies(source.estimate, source.profile, source.request.space, error)
    if as_json:
        print_json(error.as_dict() | found.as_dict())
    else:
        get_result_console().print(shortfall_page(found, source.note))
