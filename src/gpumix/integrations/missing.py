"""What is not installed, or in another version, in an error with the line that installs it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from gpumix.spec.errors import InputError, MachineError


def need(module: str, *packages: str, extra: str) -> None:
    """
    Args:
        module: of gpumix, which needs `packages`.

    Raises:
        MachineError: one of `packages` is not installed; the extra `extra` brings them all.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MachineError(
                f"{module} needs the package '{package}', which is not installed",
                fix=f'pip install "gpumix[{extra}]"',
            )


def need_names(kind: type, names: Sequence[str], *, package: str, tested: str) -> None:
    """
    Args:
        names: of `kind`, that are used or stood in for.
        tested: the versions of `package` that gpumix is tested with, as pip takes them.

    Raises:
        InputError: the version that is installed has not all of them.
    """
    missing = [name for name in names if not hasattr(kind, name)]
    if missing:
        raise InputError(
            f"{package} {version(package)} has no {kind.__name__}.{missing[0]}",
            why="another version of the library may need another gpumix",
            fix=f'pip install "{package}{tested}"',
        )
