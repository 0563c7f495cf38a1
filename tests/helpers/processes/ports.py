"""Ports of loopback for tests, of which no connection gets one before it is used."""

from __future__ import annotations

from gpumix.launch.probes.probe import find_free_port


def free_port() -> int:
    return int(str(find_free_port("127.0.0.1", 0)["port"]))
