"""A process that takes itself to be on a host of its own."""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass
from pathlib import Path

# See linux/sched.h and linux/mount.h.
_NEW_MOUNTS, _NEW_NAMES, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_BIND, _RECURSIVE, _SLAVE, _DETACH = 0x1000, 0x4000, 0x80000, 2


@dataclass(frozen=True)
class Host:
    """One that has a name of its own, and may have a network of its own.

    Args:
        network: the namespace that `ip netns` made, with files for its `/etc`; empty: the one that
            is here.
    """

    name: str
    network: str = ""

    def enter(self) -> None:
        """Be there from now on, as `unshare --uts` and `ip netns exec` have it; for a process that
        has one thread."""
        if self.network:
            with (Path("/var/run/netns") / self.network).open("rb") as file:
                _call("setns", file.fileno(), _NEW_NETWORK)
            _call("unshare", _NEW_MOUNTS)
            _call("mount", b"", b"/", None, _SLAVE | _RECURSIVE, None)
            _call("umount2", b"/sys", _DETACH)
            _call("mount", self.network.encode(), b"/sys", b"sysfs", 0, None)
            for file in (Path("/etc/netns") / self.network).iterdir():
                own, usual = str(file).encode(), f"/etc/{file.name}".encode()
                _call("mount", own, usual, None, _BIND, None)
        _call("unshare", _NEW_NAMES)
        socket.sethostname(self.name)


def _call(name: str, *arguments: bytes | int | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
