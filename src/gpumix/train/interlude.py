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
        slows_s: that the steps beside it take longer, to its end.
        beside_s: that it takes beside them; one that follows waits for its end.
    """

    still_s: float = 0.0
    slows_s: float = 0.0
    beside_s: float = 0.0

    @classmethod
    def of_steps(
        cls, still_s: float, beside_s: float, *, usual_s: float, took_s: float
    ) -> Interlude:
        """As it is seen beside some steps. Those that it outlasts it is taken to slow down as much.

        Args:
            usual_s: what these steps take with nothing beside them.
            took_s: what they took.
        """
        longer_s = max(0.0, took_s - usual_s)
        return cls(still_s, longer_s * max(1.0, beside_s / took_s), beside_s)

    def each_s(self, steps_s: float) -> float:
        """How much longer that makes steps that take `steps_s` seconds in all."""
        return self.still_s + max(self.slows_s, self.beside_s - steps_s)


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
