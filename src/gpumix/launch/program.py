"""Program to launch: a job file, a script or a module, each with its own arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpumix.schema.errors import InputError, make_missing_file_error

JOB_SUFFIXES = (".yaml", ".yml")
USAGE_FIX = "gpumix launch JOB.yaml, gpumix launch SCRIPT.py ARGUMENTS, or gpumix launch -m MODULE"


@dataclass(frozen=True)
class Program:
    """A program: `name` is a file, or a module's dotted name; a job's arguments are for `gpumix
    train`."""

    kind: Literal["job", "script", "module"]
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The interpreter's arguments."""
        if self.kind == "job":
            return ("-m", "gpumix", "train", self.name, *self.arguments)
        if self.kind == "module":
            return ("-m", self.name, *self.arguments)
        return (self.name, *self.arguments)

    @property
    def files(self) -> tuple[str, ...]:
        """Files required on each host."""
        return () if self.kind == "module" else (self.name,)

    @property
    def title(self) -> str:
        """Name for a scheduler, in letters valid everywhere."""
        name = Path(self.name).stem if self.kind != "module" else self.name.rpartition(".")[2]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or self.kind

    def overrides(self) -> list[str]:
        """Return the settings of a job replaced by arguments."""
        return list(_get_option_values("--set", self.arguments))

    def with_arguments(self, *more: str) -> Program:
        return replace(self, arguments=(*self.arguments, *more))


def parse_program(words: Sequence[str], *, module: bool) -> Program:
    """Return the program named by the words of a command line.

    Raises:
        InputError: it is none of the three, or its file is missing.
    """
    if not words:
        raise InputError("nothing is named to launch", code="program-not-named", fix=USAGE_FIX)
    name, *arguments = words
    if module:
        return Program("module", name, tuple(arguments))
    kind: Literal["job", "script"] = "job" if name.endswith(JOB_SUFFIXES) else "script"
    if kind == "script" and not name.endswith(".py"):
        raise InputError(
            "this is neither a job (.yaml) nor a script (.py)",
            code="program-kind-unknown",
            where=name,
            fix=USAGE_FIX,
        )
    if not Path(name).is_file():
        raise make_missing_file_error(kind, name)
    return Program(kind, name, tuple(arguments))


def _get_option_values(option: str, arguments: Sequence[str]) -> Iterator[str]:
    rest = iter(arguments)
    for word in rest:
        if word == option:
            yield next(rest, "")
        elif word.startswith(f"{option}="):
            yield word.removeprefix(f"{option}=")
