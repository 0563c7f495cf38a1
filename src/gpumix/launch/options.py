"""Parsing of a launch's `--python` and `--env`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpumix.hardware.host.environment import settings_named
from gpumix.launch.hosts import Host
from gpumix.schema.errors import InputError


def parse_pythons(
    words: Sequence[str], hosts: Sequence[Host], default: str = sys.executable
) -> tuple[str, dict[str, str]]:
    """Return the default interpreter, by default this process's, and the interpreters of named
    hosts.

    Raises:
        InputError: a word names an unknown host, or no interpreter.
    """
    some: dict[str, str] = {}
    for word in words:
        group, _, path = word.rpartition("=")
        meant = [_find_host(name, hosts, word) for name in group.split(",")] if group else []
        if not path or word.startswith("="):
            raise InputError(
                "this names no interpreter",
                code="interpreter-not-named",
                where=f"--python {word}",
                fix="--python HOST=PATH",
            )
        some |= {host.name: path for host in meant}
        default = path if not meant else default
    return default, some


def _find_host(name: str, hosts: Sequence[Host], word: str) -> Host:
    for host in hosts:
        if name in (host.name, host.name_without_user):
            return host
    raise InputError(
        f"'{name}' is none of the hosts",
        code="host-unknown",
        where=f"--python {word}",
        fix="--python HOST=PATH, with a host of --hosts",
    )


def parse_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables given by `NAME=VALUE`, or by `NAME` with the value in this environment.

    Raises:
        InputError: a name is invalid, or not set here.
    """
    settings: dict[str, str] = {}
    for word in words:
        name, given, value = word.partition("=")
        found = {name: value} if given else settings_named([name])
        if not (name.isidentifier() and name.isascii()):
            raise InputError(
                f"'{name}' names no variable",
                code="variable-name-invalid",
                where=f"--env {word}",
                fix="write --env NAME or --env NAME=VALUE",
            )
        if not found:
            raise InputError(
                f"{name} is not set here",
                code="variable-not-set",
                where=f"--env {word}",
                fix=f"--env {name}=VALUE",
            )
        settings |= found
    return settings
