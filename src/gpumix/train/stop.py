"""Ctrl-C, SIGTERM and a terminal that closes (SIGHUP): finish the step, then save."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Takes the signals while its `with` block runs, and remembers that one came."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = {s: signal.signal(s, self._take) for s in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
