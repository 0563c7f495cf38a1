"""Clock of a device's waits, for communication or for copies."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from gpumix.hardware import runtime


@dataclass
class WaitMark:
    """Position in a device's waits, with the `seconds` of earlier waits; None until reached."""

    seconds: float | None = None


class WaitClock:
    """Clock adding up the time that a device waits, for communication or for copies.

    On a CPU, this is the host's time inside waits. On CUDA, a wait returns at once and holds back
    the stream, so events are recorded around it and read when the total is requested.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_stream = runtime.is_gpu(device)
        self._entered = 0.0
        self._seconds = 0.0
        self._events: deque[tuple[runtime.Event, runtime.Event] | WaitMark] = deque()

    def __enter__(self) -> None:
        if self._on_stream:
            self._add_up_finished()
            begun = runtime.record_event(self._device, timing=True)
            self._events.append((begun, runtime.new_event(self._device, timing=True)))
        else:
            self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._on_stream:
            ended = self._events[-1]
            assert not isinstance(ended, WaitMark), "no mark is set inside of a wait"
            ended[1].record(runtime.current_stream(self._device))
        else:
            self._seconds += time.perf_counter() - self._entered

    def mark(self) -> WaitMark:
        """Mark the current position for `at_s`, without waiting."""
        mark = WaitMark(None if self._on_stream else self._seconds)
        if self._on_stream:
            self._events.append(mark)
        return mark

    def at_s(self, mark: WaitMark) -> float:
        """Return the seconds of all waits before `mark`; synchronizes with the last of these."""
        self._add_up_finished()
        while mark.seconds is None:
            first = self._events[0]
            assert not isinstance(first, WaitMark), "marks at the front have their seconds"
            first[1].synchronize()
            self._add_up_finished()
        return mark.seconds

    def total_s(self) -> float:
        """Return the seconds so far; on CUDA, synchronizes with the last wait."""
        return self.at_s(self.mark())

    def _add_up_finished(self) -> None:
        while self._events:
            first = self._events[0]
            if isinstance(first, WaitMark):
                first.seconds = self._seconds
            elif first[1].query():
                self._seconds += first[0].elapsed_time(first[1]) / 1e3
            else:
                return
            self._events.popleft()
