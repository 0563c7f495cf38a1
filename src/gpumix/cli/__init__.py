"""Command line: one file per verb.

stdout is for data, stderr for people. Exit codes: 0 ok, 1 bug, 2 bad input, 3 environment, 4 no
feasible plan, 5 training failed, 130 interrupted with a checkpoint saved.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from gpumix import __version__
from gpumix.cli.common import print_json
from gpumix.cli.verbs import (
    check,
    compare,
    demo,
    devices,
    doctor,
    export,
    inspect,
    launch,
    plan,
    profile,
    report,
    simulate,
    top,
    train,
    whatif,
)
from gpumix.hardware.host.environment import count_gpus_by_nvml
from gpumix.schema.errors import InputError

_ARGUMENTS_KEY = "gpumix.given"


class _VerbGroup(TyperGroup):
    """Group of the verbs. With `--json`, errors of wrong calls are JSON documents too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS_KEY] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        given = ctx.meta[_ARGUMENTS_KEY]
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as wrong:
            # Verbs raise only errors of wrong calls, whose class is typer's own.
            said = getattr(wrong, "format_message", None)
            if said and "--json" in given[: given.index("--") if "--" in given else None]:
                fix = f"{' '.join(['gpumix', *given[:1]])} --help"
                print_json(InputError(said(), fix=fix).as_dict())
            raise


app = typer.Typer(
    cls=_VerbGroup,
    help="Train transformers on whatever mixture of GPUs you have.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpumix {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train transformers on whatever mixture of GPUs you have."""


for verb in (
    devices,
    check,
    profile,
    plan,
    compare,
    whatif,
    simulate,
    train,
    report,
    top,
    launch,
    doctor,
    demo,
    export,
    inspect,
):
    verb.register(app)


def main() -> None:
    """Run the `gpumix` command."""
    count_gpus_by_nvml()
    app()
