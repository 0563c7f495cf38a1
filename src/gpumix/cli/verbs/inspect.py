"""`gpumix inspect`: contents and integrity of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpumix.cli.common import Json, print_result, require_checkpoint
from gpumix.schema.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumix.train.checkpoint.inspect import CheckpointContents


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, a run's folder, or the output folder of a script.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show a checkpoint's content and origin, and verify it.

    Reads every byte and runs nothing. Lists all checkpoints of a run, the newest first; --resume
    takes the first intact one. Ends with code 2 if one is damaged.

    Example: gpumix inspect runs/first
    """
    require_checkpoint(checkpoint)
    from rich.console import Group

    from gpumix.train.checkpoint.inspect import inspect as contents_of

    found = contents_of(checkpoint)
    print_result(
        lambda: [_as_dict(one) for one in found], lambda: Group(*_render_contents(found)), as_json
    )
    if any(one.damage is not None for one in found):
        raise typer.Exit(InputError.exit_code)


def _as_dict(one: CheckpointContents) -> dict[str, Any]:
    plan = None if one.plan is None else one.plan.model_dump(mode="json")
    return {key: value for key, value in vars(one).items() if key != "plan"} | {"plan": plan}


def _render_contents(found: Sequence[CheckpointContents]) -> Iterable[RenderableType]:
    from rich.text import Text

    from gpumix.schema.units import show_bytes
    from gpumix.train.console.tables import new_table

    table = new_table("checkpoints", "checkpoint", "step", "size", "ranks", "gpumix", "whole")
    for one in found:
        table.add_row(
            Path(one.path).name,
            _format_step(one.step, one.of_steps),
            show_bytes(one.bytes),
            "" if one.plan is None else str(len(one.plan.workers)),
            one.gpumix,
            "yes" if one.damage is None else "no",
        )
    yield table
    for one in found:
        if one.damage is not None:
            yield Text(f"damaged: {one.damage}", style="yellow")
    for one in [one for one in found if one.damage is None][:1]:
        yield from (Text(line) for line in _describe_contents(one))


def _describe_contents(one: CheckpointContents) -> Iterable[str]:
    from gpumix.schema.units import show_bytes

    yield (
        f"{one.path}: {one.parameters / 1e6:.2f} M parameters and buffers in "
        f"{show_bytes(one.model_bytes)}, model {one.model}"
    )
    states = ", ".join(one.states or {}) or "nothing"
    yield f"{one.optimizer} keeps {states}, {show_bytes(one.optimizer_bytes)} in all"
    if one.position is not None:
        epoch = "" if one.epoch is None else f", in epoch {one.epoch}"
        yield f"{one.position} samples were seen{epoch}; saved with torch {one.torch}"
    if one.plan is not None:
        stages = len(one.plan.stages)
        yield (
            f"saved by {len(one.plan.workers)} ranks in {stages} stage{'s' if stages > 1 else ''} "
            f"at ZeRO stage {one.plan.zero_stage}; any plan loads it"
        )


def _format_step(step: int | None, steps: int | None) -> str:
    if step is None:
        return ""
    return str(step) if steps is None else f"{step} of {steps}"
