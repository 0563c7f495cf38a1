"""Errors for packages missing or of another version, with the command to install them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from gpumix.schema.errors import InputError, MachineError, format_install_command


def require_packages(module: str, *packages: str, extra: str) -> None:
    """Check that the packages needed by gpumix's `module` are installed.

    Raises:
        MachineError: one of `packages` is not installed; the extra `extra` installs them all.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MachineError(
                f"{module} needs the package '{package}', which is not installed",
                code="package-missing",
                fix=format_install_command(extra),
            )


def require_attributes(kind: type, names: Sequence[str], *, package: str, tested: str) -> None:
    """Check that a class of another library has all names used by gpumix.

    Args:
        names: of `kind`, used or replaced.
        tested: versions of `package` that gpumix is tested with, in pip's notation.

    Raises:
        InputError: the installed version lacks a name.
    """
    missing = [name for name in names if not hasattr(kind, name)]
    if missing:
        raise InputError(
            f"{package} {version(package)} has no {kind.__name__}.{missing[0]}",
            code="package-version-unsupported",
            why="another version of the library may need another gpumix",
            fix=f'pip install "{package}{tested}"',
        )
