"""IP connections of this process as shown by the system, and listening sockets. Nothing here
imports torch."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from gpumix.schema.errors import MachineError

_OPEN_FILES = Path("/dev/fd")
LOOK_S = 0.02
MOST_WATCHERS = 4096  # of a process

Presence = Literal["there", "gone", "without answer"]


def listen_at(host: str, port: int, *, one_host: bool) -> socket.socket:
    """Listen only at the address of this host announced to all hosts.

    Args:
        port: 0 for any free port.
        one_host: no other host has to connect.

    Raises:
        MachineError: not an address of this host, not reachable by others, or the port is taken.
    """
    fix = (
        "name an address of this host that the others reach: torchrun --local-addr, or gpumix "
        "launch --address"
    )
    where = f"{socket.gethostname()}, {host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        name = str(address[0])
        # 127.0.0.1 or localhost means this host; another name may resolve to loopback by mistake.
        if ip_address(name).is_loopback and not one_host and host not in ("localhost", name):
            raise MachineError(
                f"the first host is told to the others as {host}, which is {name} here: they do "
                "not reach that",
                code="address-not-reachable",
                where=where,
                fix=f"{fix}, or mend its line in /etc/hosts",
            )
        return socket.create_server((name, port), family=family)
    except OSError as error:
        raise MachineError(
            f"the rendezvous cannot listen at {host}:{port}",
            code="address-not-listening",
            where=where,
            why=error.strerror or str(error),
            fix=fix,
        ) from error


def find_own_address(host: str, port: int, *, within_s: float = 60.0) -> str | None:
    """Return the address of this host in a connection to a server; None if unreachable."""
    with suppress(OSError), socket.create_connection((host, port), within_s) as connection:
        return str(connection.getsockname()[0])
    return None


def listen_for_watchers(host: str) -> socket.socket | None:
    """Return a socket listening at an address of this host and never accepting, or None if
    impossible. The system ends the connections when this process is gone, see
    `WatchedConnection`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=MOST_WATCHERS)
    except OSError:
        return None


class WatchedConnection:
    """A connection to a process listening by `listen_for_watchers`, made by the first `look`."""

    def __init__(self, host: str, port: int) -> None:
        self.address = host, port
        self._connection: socket.socket | None = None

    def look(self, *, within_s: float) -> Presence:
        """Return the presence of the process; a stopped or busy process is there."""
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self.address, within_s)
                self._connection.setblocking(False)
                _set_timeout(within_s, self._connection)
            return "gone" if not self._connection.recv(1) else "there"
        except BlockingIOError:
            return "there"
        except (ConnectionRefusedError, ConnectionResetError):
            return "gone"
        except OSError:
            return "without answer"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def set_connection_timeouts(timeout_s: float, *, port: int) -> None:
    """Let connections to a port fail after a silence of `timeout_s`, whether sending or waiting:
    the other host is gone, or the link is cut. The rendezvous store would wait for a quarter of an
    hour, or forever. Nothing changes on a system without a list of a process's connections."""
    for connection in _connections():
        with suppress(OSError):
            if connection.getpeername()[1] == port:
                _set_timeout(timeout_s, connection)


def wait_for_disconnects(port: int, *, limit_s: float) -> None:
    """Wait until no other process is connected to a server of this process, at most for `limit_s`.
    Waits that long on a system without a list of a process's connections."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and has_visitors(port):
        time.sleep(LOOK_S)


def has_visitors(port: int) -> bool:
    """Return whether other processes are connected to a server of this process. True on a system
    without a list of a process's connections."""
    if not _OPEN_FILES.is_dir():
        return True
    own: set[tuple[str, int]] = set()
    visitors: set[tuple[str, int]] = set()
    for connection in _connections():
        with suppress(OSError):
            here, there = (
                _normalize_address(connection.getsockname()),
                _normalize_address(connection.getpeername()),
            )
            if there[1] == port:
                own.add(here)
            if here[1] == port:
                visitors.add(there)
    return bool(visitors - own)


def _normalize_address(address: tuple[Any, ...]) -> tuple[str, int]:
    """Return host and port, normalized for both ends: torch may use IPv6 at a single end."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _connections() -> Iterator[socket.socket]:
    """Yield duplicates of this process's IP sockets, each closed before the next."""
    if not _OPEN_FILES.is_dir():
        return
    for file in list(_OPEN_FILES.iterdir()):
        number = int(file.name)
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection


def _set_timeout(timeout_s: float, connection: socket.socket) -> None:
    for level, option, value in _options(timeout_s):
        connection.setsockopt(level, option, value)


def _options(timeout_s: float) -> list[tuple[int, int, int]]:
    """Return the socket options for a timeout, all or none; see tcp(7). Linux has all of them."""
    names = {
        "TCP_USER_TIMEOUT": int(1000 * timeout_s),
        "TCP_KEEPIDLE": max(1, int(timeout_s / 4)),
        "TCP_KEEPINTVL": max(1, int(timeout_s / 4)),
        "TCP_KEEPCNT": 3,
    }
    if not all(hasattr(socket, name) for name in names):
        return []
    of_tcp = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in names.items()]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *of_tcp]
