"""Timestamps on a device's clock.

On a GPU these are events on the compute stream, so the host does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from gpumix.hardware import runtime

S = TypeVar("S")


class DeviceClock(Protocol[S]):
    """Timestamps of a device."""

    def now(self) -> S:
        """Return a stamp after all work submitted so far."""
        ...

    def passed(self, stamp: S) -> bool:
        """Return True if the device has reached `stamp`, without waiting."""
        ...

    def between(self, one: S, other: S) -> float:
        """Return the seconds between two stamps, waiting for the second."""
        ...


class HostClock:
    """Stamps of a device that computes synchronously, or is waited for in each step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock

    def passed(self, stamp: float) -> bool:
        return True

    def between(self, one: float, other: float) -> float:
        return other - one


class StreamClock:
    """Events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> runtime.Event:
        return runtime.record_event(self._device, timing=True)

    def passed(self, stamp: runtime.Event) -> bool:
        return stamp.query()

    def between(self, one: runtime.Event, other: runtime.Event) -> float:
        if not self.passed(other):
            other.synchronize()
        return one.elapsed_time(other) / 1e3


def make_device_clock(device: torch.device) -> DeviceClock[Any]:
    return StreamClock(device) if runtime.is_gpu(device) else HostClock()
