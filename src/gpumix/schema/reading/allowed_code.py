"""Check of the code that a job may call. A job file may come from anywhere, so a factory named in
the job runs only if the user starting the command allows the factory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from gpumix.schema.reading.overrides import parse_key


def check_allowed(job: Job, path: Path, allowed: Sequence[str], overrides: Sequence[str]) -> None:
    """Raise an InputError if a job calls code that is not allowed.

    Args:
        path: path of the job file.
        allowed: modules, with everything inside, or functions as `module:function`.
        overrides: `key=value`, also from the command line. A factory named here is allowed.
    """
    said = set(map(parse_key, overrides))
    for part, factory in (("model", job.model.factory), ("data", job.data.factory)):
        key = f"{part}.factory"
        if factory is not None and not said & {part, key}:
            check_factory(key, factory, allowed, where=str(path))


def check_factory(key: str, factory: str, allowed: Sequence[str], *, where: str = "") -> None:
    """Raise an InputError if a job's factory, named by `key`, is not allowed."""
    if any(_allows_factory(name, factory) for name in allowed):
        return
    raise InputError(
        f"'{key}' is code that would be run, '{factory}'; this command does not allow it",
        code="code-not-allowed",
        where=where,
        why="a job from elsewhere could name any function",
        fix=f"look at it, then add --allow {factory.partition(':')[0]}, or export "
        f"GPUMIX_ALLOW={factory.partition(':')[0]}",
    )


def _allows_factory(name: str, factory: str) -> bool:
    module = factory.partition(":")[0]
    return name in (factory, module) or module.startswith(f"{name}.")
