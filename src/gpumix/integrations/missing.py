"""What is not installed, in one clear error with the line that installs it."""

from __future__ import annotations

from importlib.util import find_spec

from gpumix.spec.errors import InputError


def need(*packages: str, extra: str) -> None:
    """
    Raises:
        InputError: one of `packages` is not installed; the extra `extra` brings them all.
    """
    for package in packages:
        if find_spec(package) is None:
            raise InputError(
                f"gpumix.integrations.{extra} needs the package '{package}', which is not "
                "installed",
                fix=f'pip install "gpumix[{extra}]"',
            )
