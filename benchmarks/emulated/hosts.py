"""Two hosts that are none: network namespaces with a slow line between them, on one machine.

Each rank goes into the namespace of its device's host before it opens a connection. Ranks of one
host talk over its loopback, those of two over a pair of virtual interfaces, of which each lets
through no more than the line's rate (`tc tbf`). Needs root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from gpumix.schema.cluster.cluster import Cluster
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.processes.runner import LocalRunner
from gpumix.train.processes.stop_signals import handle_signals

HOSTS = ("host-0", "host-1")
INTERFACE = "line"
BURST, PATIENCE = "256kb", "100ms"
CLONE_NEWNET = 0x40000000
FIRST_PORT = 29500


class CannotEmulateError(Exception):
    """This machine, or this user, has no network namespaces."""


@dataclass(frozen=True)
class Host:
    """A namespace and its address."""

    namespace: str
    address: str

    def enter(self) -> None:
        """Let this thread, and those that it begins, talk from there."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/var/run/netns", self.namespace).open("rb") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns", self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


@contextmanager
def two_hosts(rate: str) -> Iterator[dict[str, Host]]:
    """`HOSTS`, with a line of so much (as `tc` names it, "1gbit") in each direction.

    Raises:
        CannotEmulateError: this machine or this user cannot make them.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise CannotEmulateError("network namespaces need root, and `ip` and `tc` (iproute2)")
    hosts = {
        name: Host(f"gpumix-{os.getpid()}-{number}", f"10.77.0.{number + 1}")
        for number, name in enumerate(HOSTS)
    }
    one, other = (host.namespace for host in hosts.values())
    with ExitStack() as stack:
        stack.enter_context(_ended_in_order())
        for host in hosts.values():
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
        _ip("link", "add", INTERFACE, "netns", one, "type", "veth",
            "peer", "name", INTERFACE, "netns", other)  # fmt: skip
        for host in hosts.values():
            inside = ("-n", host.namespace)
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip(*inside, "link", "set", interface, "up")
            _run("tc", *inside, "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                 "rate", rate, "burst", BURST, "latency", PATIENCE)  # fmt: skip
        yield hosts


@dataclass
class TwoHosts(LocalRunner):
    """Runs every rank in the namespace of its host."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    _ports: Iterator[int] = field(default_factory=lambda: count(FIRST_PORT))

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        port = next(self._ports)
        return super().run(at_its_host, cluster, work, self.hosts, port, *args, saves=saves)


def at_its_host(
    seat: RankAddress, work: Callable[..., Any], hosts: Mapping[str, Host], port: int, *args: Any
) -> Any:
    """The work of a rank; the first one holds the store."""
    hosts[seat.device.host].enter()
    first = next(iter(hosts.values()))
    return work(replace(seat, host=first.address, port=port, holds_store=seat.rank == 0), *args)


def _ended_in_order() -> AbstractContextManager[None]:
    """What ends this process ends it as Ctrl-C does, so that nothing is left behind."""
    return handle_signals([signal.SIGTERM], signal.default_int_handler)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotEmulateError(f"`{' '.join(command)}`: {done.stderr.strip()}")
