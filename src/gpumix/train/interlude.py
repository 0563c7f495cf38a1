"""What a run does once in so many steps, and what that costs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interlude:
    """What something costs that a run does once in so many steps.

    Attributes:
        still_s: that training stands still for it.
        settle_s: that the next step waits for it.
        beside_s: that it takes beside the next steps; one that follows waits for its end.
    """

    still_s: float = 0.0
    settle_s: float = 0.0
    beside_s: float = 0.0

    def each_s(self, steps_s: float) -> float:
        """How much longer that makes steps that take `steps_s` seconds in all."""
        return self.still_s + max(self.settle_s, self.beside_s - steps_s)


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
