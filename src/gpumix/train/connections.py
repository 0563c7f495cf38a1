"""Connections of this process over IP, as its system shows them. Nothing here imports torch."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OPEN_FILES = Path("/dev/fd")
LOOK_S = 0.02


def give_up_after(timeout_s: float, *, port: int) -> None:
    """Let connections to a port fail once the other end was not heard for so long, whether it is
    talked to or waited for: its host is gone, or the link is cut. The rendezvous store would wait
    for a quarter of an hour, or for ever. Where the system does not show a process its connections,
    nothing changes."""
    options = _options(timeout_s)
    for connection in _connections() if options else ():
        with suppress(OSError):
            if connection.getpeername()[1] == port:
                for level, option, value in options:
                    connection.setsockopt(level, option, value)


def wait_until_left(port: int, *, limit_s: float) -> None:
    """Wait until no other process is connected to a server of this one; no longer than `limit_s`,
    and as long where the system does not show a process its connections."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and _is_visited(port):
        time.sleep(LOOK_S)


def _is_visited(port: int) -> bool:
    if not _OPEN_FILES.is_dir():
        return True
    own, visitors = set(), set()
    for connection in _connections():
        with suppress(OSError):
            here, there = connection.getsockname()[:2], connection.getpeername()[:2]
            if there[1] == port:
                own.add(here)
            if here[1] == port:
                visitors.add(there)
    return bool(visitors - own)


def _connections() -> Iterator[socket.socket]:
    """Each is closed when the next one is asked for, which closes nothing but a copy."""
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


def _options(timeout_s: float) -> list[tuple[int, int, int]]:
    """See tcp(7). Linux has all of them."""
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
