"""A clock that only moves when told: what goes by seconds is tested exactly, and at once."""

from __future__ import annotations


class VirtualClock:
    """Seconds that pass only by `sleep`, which the device does, and `spend`, as the CPU does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def spend(self, seconds: float) -> None:
        self.now += seconds
