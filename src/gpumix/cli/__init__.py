"""Command line: one file per verb.

Results go to stdout, progress and warnings to stderr. Exit codes: 0 ok, 1 bug, 2 bad input, 3
environment, 4 no feasible plan, 5 training failed, 130 interrupted with a checkpoint saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import cleandoc
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperGroup

from gpumix import __version__
from gpumix.cli.common import make_command, print_json
from gpumix.cli.planning import compare, plan, simulate, whatif
from gpumix.cli.verbs import (
    check,
    demo,
    devices,
    doctor,
    export,
    init,
    inspect,
    launch,
    profile,
    report,
    schema,
    top,
    train,
)
from gpumix.hardware.host.environment import count_gpus_by_nvml, keep_compiled_code
from gpumix.schema.errors import InputError

_ARGUMENTS_KEY = "gpumix.given"
_SUGGESTION = re.compile(r"\(?(?:Did you mean|Possible options:)\s+(?P<names>.*?)\??\)?$")
_PLAIN = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "not a whole number",
    "Input should be a valid number, unable to parse string as a number": "not a number",
    "Input should be ": "it must be ",
}
_SUMMARIES: dict[ModuleType, str] = {  # verbs in the order of `gpumix --help`, in one line each
    devices: "Show the GPUs of this host, a job or a cluster file.",
    check: "Test whether a cluster is fit to train, in a minute.",
    profile: "Measure each GPU type on a job's model.",
    plan: "Does a model fit, and how fast does it train?",
    compare: "Compare all ways to divide the work.",
    whatif: "What is one more GPU, or another link, worth?",
    simulate: "Replay one step of a plan: who waits for what.",
    train: "Train a job: measure, plan, train.",
    report: "Write a run as one page that works offline.",
    top: "Watch a run live.",
    launch: "Run a script or job on all GPUs of one or more hosts.",
    doctor: "Find what slows training down, and the fix.",
    demo: "Train a small GPT on emulated, unequal devices.",
    init: "Write a first job that runs.",
    export: "Write a run's weights for transformers.",
    inspect: "List a run's checkpoints, and check them.",
    schema: "Print the JSON schema of jobs, for editors.",
}
VERBS = {module.__name__.rpartition(".")[2] for module in _SUMMARIES}


class _VerbGroup(TyperGroup):
    """Group of the verbs. Wrong calls are told in the form of all errors, with `--json` as JSON."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        given = list(args)
        with _told_as_errors(given):
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta[_ARGUMENTS_KEY] = given
        return context

    def invoke(self, ctx: Any) -> Any:
        with _told_as_errors(ctx.meta[_ARGUMENTS_KEY]):
            return super().invoke(ctx)


@contextmanager
def _told_as_errors(given: list[str]) -> Iterator[None]:
    """Print errors of wrong calls, whose classes are typer's own, as errors of gpumix."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as wrong:
        from gpumix.train.console.terminal import print_error

        # Verbs raise only errors of wrong calls, which have this method.
        said = getattr(wrong, "format_message", None)
        if said is None or not given:  # without arguments the help is printed
            raise
        verb = [word for word in given[:1] if word in VERBS]
        what, meant = _split_suggestion(_make_plain(str(said())))
        fix = f"see {' '.join(['gpumix', *verb, '--help'])}"
        error = InputError(
            what, code="wrong-call", fix=f"did you mean {meant}? {fix}" if meant else fix
        )
        print_error(f"gpumix: {error}")
        if "--json" in given[: given.index("--") if "--" in given else None]:
            print_json(error.as_dict())
        raise typer.Exit(error.exit_code) from None


def _split_suggestion(text: str) -> tuple[str, str]:
    """Split the message of a wrong name into the problem and similar names, if it has some."""
    found = _SUGGESTION.search(text)
    if found is None:
        return text, ""
    return text[: found.start()].rstrip(" ."), found["names"]


def _make_plain(text: str) -> str:
    """Return the message of a wrong call without the words of the library that checks values."""
    for theirs, plain in _PLAIN.items():
        text = text.replace(theirs, plain)
    return text.strip().rstrip(".")


app = typer.Typer(
    cls=_VerbGroup,
    help="Train one model on GPUs that don't match.",
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
    """Train one model on GPUs that don't match."""


for verb, summary in _SUMMARIES.items():
    command = getattr(verb, verb.__name__.rpartition(".")[2])
    text = re.sub(r"\n+(?=Example: )", "\n\n", cleandoc(command.__doc__ or ""))
    app.command(
        help=re.sub(r"(?<!\n)\n(?!\n)", " ", text),  # wrapped by the library
        short_help=summary,
        context_settings=getattr(verb, "CONTEXT_SETTINGS", None),
    )(make_command(command))


def main() -> None:
    """Run the `gpumix` command."""
    count_gpus_by_nvml()
    with suppress(OSError):  # compiling says so
        keep_compiled_code()
    app()
