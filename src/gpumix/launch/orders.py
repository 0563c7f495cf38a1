"""Orders to a running launch: to stop, so that runs save, and to end at once.

Orders arrive as signals, or by standard input from a launcher on another host; its loss or silence
is an order to stop.
"""

from __future__ import annotations

import enum
import os
import select
import sys
import threading
import time
from contextlib import AbstractContextManager
from types import FrameType

from gpumix.train.processes.stop_signals import (
    asks_immediate_end,
    get_handled_signals,
    handle_signals,
)

HEARTBEAT_S = 5.0  # interval of a launcher's signs of life
HEARTBEAT_TIMEOUT_S = 60.0  # limit of a launcher's silence
STOP_MESSAGE = b"gpumix: stopping, runs save now; Ctrl-C ends all at once\n"


class Order(enum.IntEnum):
    CONTINUE = 0
    STOP = 1
    END = 2


# Words of a launcher, a line each.
ORDERS_BY_WORD = {b"alive": Order.CONTINUE, b"stop": Order.STOP, b"end": Order.END}


class Orders:
    """The highest order so far.

    Args:
        led: orders arrive by standard input too.
    """

    def __init__(self, *, led: bool = False) -> None:
        self.given = Order.CONTINUE
        self._led = led

    def give(self, order: Order) -> None:
        self.given = max(self.given, order)

    def take_signals(self) -> AbstractContextManager[None]:
        """Take Ctrl-C, SIGTERM and SIGHUP as orders during the block: the first to stop, a later
        Ctrl-C to end."""

        def take(number: int, frame: FrameType | None) -> None:
            if not self._led and self.given is Order.CONTINUE:
                os.write(2, STOP_MESSAGE)  # a handler may interrupt a print
            self.give(Order.END if self.given and asks_immediate_end(number) else Order.STOP)

        return handle_signals(get_handled_signals(), take)

    def listen(self) -> None:
        """Read orders from standard input, if led, until this process ends."""
        if self._led:
            threading.Thread(target=self._hear, name="gpumix-orders", daemon=True).start()

    def _hear(self) -> None:
        file, rest, heard = sys.stdin.fileno(), b"", time.monotonic()
        while time.monotonic() - heard < HEARTBEAT_TIMEOUT_S:
            if not select.select([file], [], [], 1.0)[0]:
                continue
            read = os.read(file, 4096)
            if not read:
                break
            heard = time.monotonic()
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                self.give(ORDERS_BY_WORD.get(line.strip(), Order.CONTINUE))
        self.give(Order.STOP)
