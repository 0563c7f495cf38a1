"""What all verbs share: options, how errors leave the process, how results are printed."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from gpumix.spec.errors import EXIT_BUG, EXIT_INTERRUPTED, GpumixError

P = ParamSpec("P")

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job, a YAML file.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a key of the job: --set optimizer.lr=1e-3"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def verb(command: Callable[P, None]) -> Callable[P, None]:
    """Make a function a command: its errors become one clear message and the right exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        debug, as_json = bool(kwargs.get("debug")), bool(kwargs.get("as_json"))
        try:
            command(*args, **kwargs)
        except GpumixError as error:
            _say(str(error), error, debug)
            if as_json:
                print_json(error.as_dict())
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            _say("interrupted", error, debug)
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            _say(f"a bug in gpumix: {error}", error, debug)
            raise typer.Exit(EXIT_BUG) from error

    return run


def _say(message: str, error: BaseException, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    elif not isinstance(error, GpumixError | KeyboardInterrupt):
        message += "\n  fix: run it again with --debug and report what that shows"
    sys.stderr.write(f"gpumix: {message}\n")


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value) + "\n")


@contextmanager
def quiet_unless(speaks: bool) -> Iterator[Callable[[Any], None]]:
    """A function that shows something on stderr, or does nothing in a process that is not to."""
    from gpumix.train.tables import stderr

    console = stderr()
    yield console.print if speaks else lambda thing: None
