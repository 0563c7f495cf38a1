"""The command line: one file per verb.

stdout is data, stderr is talk. Exit codes: 0 ok, 1 bug, 2 bad input, 3 environment, 4 no feasible
plan, 5 training failed, 130 interrupted with a checkpoint saved.
"""

from __future__ import annotations

import typer

from gpumix import __version__
from gpumix.cli import (
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

app = typer.Typer(
    help="Train transformers on whatever mixture of GPUs you have.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpumix {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
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
    """The entry point of the `gpumix` command."""
    app()
