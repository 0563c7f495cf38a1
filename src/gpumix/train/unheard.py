"""Connections of this process whose other end does not answer any more, because its host is gone or
the link is cut. Nothing here imports torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")


def give_up_after(timeout_s: float, *, port: int) -> None:
    """Let connections to a port fail once the other end was not heard for so long, whether it is
    talked to or waited for; the rendezvous store would wait for a quarter of an hour, or for ever.
    Where the system does not show a process its connections, nothing changes."""
    options = _options(timeout_s)
    if not options or not _OPEN_FILES.is_dir():
        return
    for file in _OPEN_FILES.iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as connection:
            over_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
            if over_ip and connection.getpeername()[1] == port:
                for level, option, value in options:
                    connection.setsockopt(level, option, value)


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
