"""Tables of all verbs with their options, from the functions that typer runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Context
from typer.models import ArgumentInfo, OptionInfo

from gpumix.cli import app
from gpumix.schema import errors

TYPES = {Path: "PATH", str: "TEXT", int: "NUMBER", float: "NUMBER"}


def tables() -> str:
    """All sections of the page."""
    sections = [_verb(c.callback, c.help or "") for c in app.registered_commands if c.callback]
    return "\n\n".join([*sections, _exit_codes()])


def _verb(function: Callable[..., Any], text: str) -> str:
    name = function.__name__
    arguments, options = [], []
    for parameter, info in _parameters(function):
        (arguments if isinstance(info, ArgumentInfo) else options).append((parameter, info))
    wanted = [
        f"{info.metavar}" if p.default is inspect.Parameter.empty else f"[{info.metavar}]"
        for p, info in arguments
    ]
    wanted += [_names(p, info)[0] for p, info in options if p.default is inspect.Parameter.empty]
    usage = " ".join(["gpumix", name, *wanted, "[OPTIONS]"])
    text, *examples = text.split("Example: ")
    rows = [f"| `{info.metavar}` | | {info.help} |" for _, info in arguments]
    rows += [_option(parameter, info) for parameter, info in options]
    table = "\n".join(["| | default | |\n|---|---|---|", *rows])
    about = re.sub(r"\n(torchrun .*)", r"\n\n    \1", text.strip())
    shown = "\n".join(f"    {example.strip()}" for example in examples)
    return f"## gpumix {name}\n\n    {usage}\n\n{about}\n\nExample:\n\n{shown}\n\n{table}"


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Each parameter, its annotation resolved, and what typer was told about it."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is Context:  # given by typer, not by users
            continue
        annotation, *extras = get_args(hints[name])
        assert get_origin(hints[name]) is Annotated, f"{name} has no help"
        info = next(e for e in extras if isinstance(e, OptionInfo | ArgumentInfo))
        yield parameter.replace(annotation=annotation), info


def _option(parameter: inspect.Parameter, info: OptionInfo) -> str:
    shown = ", ".join(f"`{name}`" for name in _names(parameter, info))
    default = parameter.default
    if default is inspect.Parameter.empty:
        told = "**required**"
    else:
        told = "" if default in (None, False) or default == [] else f"`{default}`"
    return f"| {shown} | {told} | {info.help} |"


def _names(parameter: inspect.Parameter, info: OptionInfo) -> list[str]:
    """Each name of an option with the value that follows it."""
    value = info.metavar or _type(parameter.annotation)
    # In `Annotated` the first name stands where a default would.
    names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    return [f"{name} {value}".rstrip() for name in names]


def _type(annotation: Any) -> str:
    parts = [annotation, *get_args(annotation)]
    return next((TYPES[part] for part in parts if part in TYPES), "")


def _exit_codes() -> str:
    kinds = [errors.GpumixError, *errors.GpumixError.__subclasses__()]
    told: dict[int, str] = {errors.EXIT_OK: "All went well.", errors.EXIT_BUG: "A bug in gpumix."}
    for kind in kinds:
        if kind.__module__ == errors.__name__ and kind.exit_code not in told:
            told[kind.exit_code] = (inspect.getdoc(kind) or "").splitlines()[0]
    rows = "\n".join(f"| {code} | {text} |" for code, text in sorted(told.items()))
    return f"## Exit codes\n\n| code | meaning |\n|---|---|\n{rows}"
