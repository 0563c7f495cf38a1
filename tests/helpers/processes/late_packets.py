"""A program that gives packets back later, for kernels without `netem`: it stands between two
interfaces of a router."""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import sys
import time
from contextlib import suppress

# See linux/if_tun.h.
_TUN, _NO_INFO, _SET_INTERFACE = 0x0001, 0x1000, 0x400454CA
_LARGEST = 65536
# What it says first: that it stands there, or why it cannot.
READY, NONE = "ready", "no interface for a program: "
_DIRECTIONS = 2


def held(number: int) -> str:
    """The interface that packets of one direction go to."""
    return f"late{number}"


def _hold_back(seconds: float) -> None:
    try:
        open_ones = [_interface(held(number)) for number in range(_DIRECTIONS)]
    except OSError as error:
        print(f"{NONE}{error}", flush=True)
        return
    print(READY, flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, file, packet = heapq.heappop(waiting)
            with suppress(OSError):
                os.write(file, packet)
        patience = max(0.0, waiting[0][0] - now) if waiting else None
        for file in select.select(open_ones, [], [], patience)[0]:
            number += 1
            packet = os.read(file, _LARGEST)
            heapq.heappush(waiting, (time.monotonic() + seconds, number, file, packet))


def _interface(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TUN | _NO_INFO))
    return file


if __name__ == "__main__":
    _hold_back(float(sys.argv[1]))
