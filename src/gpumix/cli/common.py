"""Common parts of all verbs: options, exit on errors, printing of results."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from gpumix.hardware.host.environment import ALLOW, world_size
from gpumix.schema.errors import (
    ENDED_AT_ONCE,
    GpumixError,
    InputError,
    Interrupted,
    MachineError,
    format_install_command,
)
from gpumix.schema.units import hide_exact_bytes
from gpumix.train.processes.stop_signals import handle_signals

if TYPE_CHECKING:
    from rich.console import RenderableType

P = ParamSpec("P")

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job, a YAML file.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a key of the job: --set optimizer.lr=1e-3"
    ),
]
Allowed = Annotated[
    list[str],
    typer.Option(
        "--allow",
        metavar="MODULE",
        envvar=ALLOW,
        help="Code that the job may run: a module, or module:function. May be repeated.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="optimal, staged, model, undivided, even, proportional, poplar, cephalo or "
        "best-subset; default: the job's.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
ClusterFile = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="FILE", help="Take the devices of this cluster file, not the job's."
    ),
]
TraceStep = Annotated[
    int | None,
    typer.Option(
        "--trace-step",
        min=1,
        metavar="STEP",
        help="Write a trace of this step into the run's folder, for ui.perfetto.dev.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check everything and print what would run; start and write nothing."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
CLUSTER_FILES = (".yaml", ".yml", ".json")
FOR_TRAINING = ("torch", "greenlet", "safetensors")  # packages of the extra `train`
_shows_tracebacks = ContextVar("shows_tracebacks", default=False)


def make_command(command: Callable[P, None]) -> Callable[P, None]:
    """Make a function a command: errors become a clear message and the right exit code. It gets the
    option `--debug`, see `shows_tracebacks`."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        debug, as_json = bool(kwargs.pop("debug", False)), bool(kwargs.get("as_json"))
        before = _shows_tracebacks.set(debug)
        try:
            with _interrupt_on_sigterm():
                command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except (Exception, KeyboardInterrupt) as caught:
            from gpumix.train.console.terminal import print_error

            error = _translate_error(caught)
            if debug:
                traceback.print_exception(caught, file=sys.stderr)
            with suppress(OSError):  # the reader may be gone
                print_error(f"gpumix: {hide_exact_bytes(str(error))}")
                if as_json and not isinstance(error, _StdoutError):
                    print_json(error.as_dict())
            raise typer.Exit(error.exit_code) from None
        finally:
            _shows_tracebacks.reset(before)

    _add_option(run, "debug", False, Debug)
    return run


@dataclass(frozen=True)
class Shorthand:
    """An option for a key of a job: `--cluster FILE` is `--set cluster=FILE`.

    Attributes:
        kind: the option's annotation, as typer reads it.
        check: refuses a wrong value.
    """

    name: str
    key: str
    kind: Any
    check: Callable[[str], None] | None = None


def take_shorthands(
    *shorthands: Shorthand,
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Give a command that reads a job options for single keys of it. The command gets them as
    `overrides`."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            for one in shorthands:
                value = kwargs.pop(one.name, None)
                if value is None:
                    continue
                if one.check is not None:
                    one.check(str(value))
                given: Any = kwargs.get("overrides", ())
                kwargs["overrides"] = [*given, f"{one.key}={value}"]
            command(*args, **kwargs)

        for one in shorthands:
            _add_option(run, one.name, None, one.kind, before="overrides")
        return run

    return decorate


def _add_option(
    run: Callable[..., None], name: str, default: Any, kind: Any, *, before: str = ""
) -> None:
    """Give `run`, which wraps a command, one more option, in front of another one or last."""
    own = signature(run, eval_str=True)
    parameters = list(own.parameters.values())
    place = list(own.parameters).index(before) if before else len(parameters)
    option = Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
    parameters.insert(place, option)
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = run.__annotations__ | {name: kind}


def is_cluster_file(text: str) -> bool:
    """Return whether the argument of `--cluster` is the path of a file, there or not, and not names
    of cards."""
    # Not `Path.is_file`, which fails on a text too long for a path.
    return text.endswith(CLUSTER_FILES) or os.path.isfile(text)  # noqa: PTH113


def refuse_names_of_cards(text: str) -> None:
    """Refuse cards that are only named, where devices must be here."""
    from gpumix.hardware.estimates.cluster_shorthand import parse_cluster

    if is_cluster_file(text):
        return
    any_link = "10GbE" if ";" in text else None  # only whether the cards are known matters
    try:
        parse_cluster(text, network=any_link)
    except GpumixError:
        return  # reading the file tells what is wrong
    else:
        raise InputError(
            f"'{text}' names cards, and this command needs devices that are here",
            code="cluster-without-devices",
            where="--cluster",
            fix="leave it out to use the GPUs of this host, or give a cluster file; `gpumix plan` "
            "takes names of cards",
        )


OF_CLUSTER = Shorthand("cluster", "cluster", ClusterFile, refuse_names_of_cards)
OF_STRATEGY = Shorthand("strategy", "strategy", Strategy)
OF_TRACE_STEP = Shorthand("trace_step", "advanced.trace_step", TraceStep)


def shows_tracebacks() -> bool:
    """Return whether the command that runs was asked to show tracebacks."""
    return _shows_tracebacks.get()


def _interrupt_on_sigterm() -> AbstractContextManager[None]:
    """Let SIGTERM end a verb like Ctrl-C: with a message, and with everything the verb waits for.
    In one of several processes the default stays and ends any call at once: the launcher says why.
    """
    if world_size() > 1:
        return nullcontext()
    return handle_signals([signal.SIGTERM], signal.default_int_handler)


def _translate_error(error: BaseException) -> GpumixError:
    from gpumix.train.processes.error_translation import translate_error

    if isinstance(error, KeyboardInterrupt):
        return Interrupted(ENDED_AT_ONCE, code="interrupted-at-once")
    if isinstance(error, ModuleNotFoundError) and error.name in FOR_TRAINING:
        return MachineError(
            f"this command needs {error.name}, which is not installed",
            code="package-missing",
            why="only estimates work without it: gpumix plan --cluster ... --model ...",
            fix="for GPUs, torch first, as pytorch.org says; then "
            + format_install_command("transformers"),
        )
    return translate_error(error, "")


def require_checkpoint(path: Path) -> None:
    """Raise InputError if nothing is at a path, before code that reads checkpoints is imported."""
    if not path.exists():
        raise InputError(
            "there is no checkpoint here",
            code="no-checkpoint",
            where=str(path),
            fix="give the folder of a run or of one of its checkpoints",
        )


def refuse_set_without_job(job: Path | None, overrides: Sequence[str], *, fix: str) -> None:
    """Raise InputError if keys of a job are replaced without a job."""
    if overrides and job is None:
        what = "--set replaces keys of a job, and no job is given"
        raise InputError(what, code="set-without-job", where=overrides[0], fix=fix)


def print_result(
    value: Callable[[], Any], shown: Callable[[], RenderableType], as_json: bool, note: str = ""
) -> None:
    """Print a result on stdout: the value as JSON, or the view for people, after the note."""
    from gpumix.train.console.terminal import get_result_console

    if as_json:
        print_json(value())
        return
    view = shown()
    console = get_result_console()
    if note:
        console.print(note, style="yellow")
    console.print(view)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout.

    Raises:
        MachineError: stdout is not writable.
    """
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except OSError as error:
        # At exit, the rest of the buffer would be tried, and reported, once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _StdoutError(
            "cannot write the result to stdout",
            code="stdout-not-writable",
            why=error.strerror or "",
        ) from error


class _StdoutError(MachineError):
    """Error of writing to stdout: the reader is gone, or the disk is full."""
