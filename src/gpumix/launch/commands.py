"""The commands of a launch: what runs on each host, and how ssh is told.

Pure, so that what is printed for hands is what is run. A host's login shell gets one line, of words
that all shells read alike.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gpumix.launch.hosts import Host, Place
from gpumix.launch.program import Program

HOST_MODULE = "gpumix.launch.host"
NO_FOLDER = 91  # what the shell leaves with where the working directory is not there
# A link that is cut is noticed by ssh after some 30 s, whatever the user's own settings are.
NOTICE = ("ServerAliveInterval=10", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other: an address of the first host, as the others reach it."""

    address: str
    port: int


@dataclass(frozen=True)
class Surroundings:
    """What a program finds on every host: the folder it starts in, variables, interpreters by host.

    `grace_s`: how long ranks that are asked to stop may take.
    """

    folder: PurePath
    python: str
    pythons: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 60.0

    def python_on(self, host: Host) -> str:
        return self.pythons.get(host.name, self.python)


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached: the command, and how long one may take to answer."""

    words: tuple[str, ...] = ("ssh",)
    timeout_s: float = 20.0

    def command(self, host: Host, remote: str) -> list[str]:
        """Runs `remote` on a host and never asks anything; its standard input is the remote's."""
        options = ["BatchMode=yes", f"ConnectTimeout={max(1, round(self.timeout_s))}", *NOTICE]
        words = [word for option in options for word in ("-o", option)]
        return [*self.words, "-T", *words, "--", host.name, remote]

    def by_hand(self, host: Host, remote: str) -> str:
        """The same for a terminal, whose Ctrl-C then reaches the remote, as a line for a shell."""
        return shlex.join([*self.words, "-t", "--", host.name, remote])

    def settings_of(self, host: Host) -> list[str]:
        """Tells what the user's configuration says of a host, and connects to nothing."""
        return [*self.words, "-G", "--", host.name]


def on_host(
    place: Place,
    program: Program,
    around: Surroundings,
    *,
    world: int,
    meeting: Meeting,
    led: bool,
) -> str:
    """What a host's shell is told, to run its ranks.

    Args:
        led: orders come by standard input; else signals do.
    """
    words = [
        "-m",
        HOST_MODULE,
        *ranks_words(str(place.first), place.processes, world),
        *meeting_words(meeting.address, str(meeting.port)),
        "--grace",
        f"{around.grace_s:g}",
        *(["--led"] if led else []),
        "--",
        *program.words,
    ]
    return shell_line(around, place.host, words)


def ranks_words(first: str, processes: int, world: int) -> list[str]:
    return ["--first-rank", first, "--processes", str(processes), "--world", str(world)]


def meeting_words(address: str, port: str) -> list[str]:
    return ["--address", address, "--port", port]


def probing(host: Host, around: Surroundings, asked: Mapping[str, object]) -> str:
    """What a host's shell is told, to answer what is asked; the interpreter reads its program."""
    return shell_line(around, host, ["-", json.dumps(asked)])


def shell_line(around: Surroundings, host: Host, words: Sequence[str]) -> str:
    settings = [f"{name}={value}" for name, value in sorted(around.settings.items())]
    env = ["env", *settings] if settings else []
    run = shlex.join([*env, around.python_on(host), *words])
    return f"cd {shlex.quote(str(around.folder))} || exit {NO_FOLDER}; exec {run}"
