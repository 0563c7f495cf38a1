"""Commands of a launch: for each host's shell, and for ssh.

Pure, so commands printed for manual use equal the commands run. A host's login shell gets one line,
of words with equal meaning in all shells.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from gpumix.launch.hosts import Host, HostRanks
from gpumix.launch.program import Program

HOST_MODULE = "gpumix.launch.ranks.host_launcher"
LOST_EXIT_CODE = 255  # ssh's exit code without a connection
NO_FOLDER = 91  # the shell's exit code without the working directory
# ssh notices a cut link after some 30 s, regardless of the user's settings.
KEEPALIVE_OPTIONS = ("ServerAliveInterval=10", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class RendezvousAddress:
    """Address of the ranks' rendezvous: the first host's, as reached from all hosts."""

    address: str
    port: int


@dataclass(frozen=True)
class LaunchEnvironment:
    """Environment of a program on every host: working directory, variables, interpreters by host.

    `grace_s`: time limit of ranks asked to stop.
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
    """The ssh command for reaching hosts, and a host's time limit to answer."""

    words: tuple[str, ...] = ("ssh",)
    timeout_s: float = 20.0

    def command(self, host: Host, remote: str) -> list[str]:
        """Return the command running `remote` on a host without prompts, its standard input
        connected."""
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={max(1, round(self.timeout_s))}",
            *KEEPALIVE_OPTIONS,
        ]
        words = [word for option in options for word in ("-o", option)]
        return [*self.words, "-T", *words, "--", host.name, remote]

    def make_interactive_line(self, host: Host, remote: str) -> str:
        """Return a shell line running `remote` from a terminal, whose Ctrl-C reaches the remote."""
        return shlex.join([*self.words, "-t", "--", host.name, remote])

    def make_config_query(self, host: Host) -> list[str]:
        """Return the command printing the user's ssh configuration of a host, without
        connecting."""
        return [*self.words, "-G", "--", host.name]


def make_host_line(
    place: HostRanks,
    program: Program,
    around: LaunchEnvironment,
    *,
    world: int,
    meeting: RendezvousAddress,
    led: bool,
) -> str:
    """Return the line for a host's shell to run the host's ranks.

    Args:
        led: orders arrive by standard input; otherwise by signals.
    """
    words = [
        "-m",
        HOST_MODULE,
        *make_rank_arguments(str(place.first), place.processes, world),
        *make_rendezvous_arguments(meeting.address, str(meeting.port)),
        "--grace-period",
        f"{around.grace_s:g}",
        *(["--led"] if led else []),
        "--",
        *program.words,
    ]
    return shell_line(around, place.host, words)


def make_rank_arguments(first: str, processes: int, world: int) -> list[str]:
    return ["--first-rank", first, "--processes", str(processes), "--world", str(world)]


def make_rendezvous_arguments(address: str, port: str) -> list[str]:
    return ["--address", address, "--port", port]


def make_probe_line(host: Host, around: LaunchEnvironment, asked: Mapping[str, object]) -> str:
    """Return the line for a host's shell to answer questions; the interpreter reads its program."""
    return shell_line(around, host, ["-", json.dumps(asked)])


def shell_line(around: LaunchEnvironment, host: Host, words: Sequence[str]) -> str:
    settings = [f"{name}={value}" for name, value in sorted(around.settings.items())]
    env = ["env", *settings] if settings else []
    run = shlex.join([*env, around.python_on(host), *words])
    return f"cd {shlex.quote(str(around.folder))} || exit {NO_FOLDER}; exec {run}"
