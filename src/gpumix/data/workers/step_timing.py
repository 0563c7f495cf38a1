"""Measurement of a device's step times, and of its idle time between steps.

The loader sees when a batch is taken and when the next is requested. If the host waits for the
device in between, its clock gives both times. If the host runs ahead, the interval is only launch
time. In that case stamps go into the device's own stream; they are read once passed, and nothing
waits for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic

import torch

from gpumix.hardware.timestamps import DeviceClock, HostClock, S, StreamClock


@dataclass(frozen=True)
class TimedStep:
    """A step as seen by the device: seconds idle for data, and seconds with the previous batch.
    `ready`: the batch was ready when requested."""

    waited_s: float
    device_s: float
    ready: bool


class StepClock(Generic[S]):
    """A clock for a loader's steps: call `asked` to request a batch, `taken` on receipt."""

    def __init__(self, stamps: DeviceClock[S]) -> None:
        self._stamps = stamps
        self._before: S | None = None  # when the previous batch was taken
        self._asked: S | None = None
        self._under_way: deque[tuple[S, S, S, bool]] = deque()

    def asked(self) -> None:
        self._asked = self._stamps.now()

    def taken(self, *, ready: bool) -> None:
        assert self._asked is not None, "it was asked for"
        now = self._stamps.now()
        if self._before is not None:
            self._under_way.append((self._before, self._asked, now, ready))
        self._before = now

    def told(self) -> list[TimedStep]:
        """Return the steps finished by the device since the last call."""
        found = []
        while self._under_way and all(map(self._stamps.passed, self._under_way[0][:3])):
            before, asked, taken, ready = self._under_way.popleft()
            waited_s = self._stamps.between(asked, taken)
            found.append(TimedStep(waited_s, self._stamps.between(before, asked), ready))
        return found

    def forget(self) -> None:
        """Drop unfinished steps, and the previous batch."""
        self._under_way.clear()
        self._before = None


def make_step_clock(device: torch.device | None) -> StepClock[Any]:
    """Return a clock by the stream of a GPU, or by the host without one."""
    return StepClock(HostClock()) if device is None else StepClock(StreamClock(device))
