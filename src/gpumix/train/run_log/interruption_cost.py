"""Cost of periodic work of a run, for example checkpoints and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class InterruptionCost:
    """Cost of work done once in several steps.

    Attributes:
        still_s: pause of training for the work.
        slows_s: slowdown of concurrent steps, until the end of the work.
        beside_s: duration of concurrent work; the next such work waits for its end.
    """

    pause_s: float = 0.0
    slowdown_s: float = 0.0
    overlapped_s: float = 0.0

    @classmethod
    def of_steps(
        cls, still_s: float, beside_s: float, *, usual_s: float, took_s: float
    ) -> InterruptionCost:
        """Build from work during some steps; any steps beyond are assumed to slow down as much.

        Args:
            usual_s: duration of these steps without the work.
            took_s: duration of these steps with it.
        """
        longer_s = max(0.0, took_s - usual_s)
        return cls(still_s, longer_s * max(1.0, beside_s / took_s), beside_s)

    def compute_added_s(self, steps_s: float) -> float:
        """Return the time added to steps taking `steps_s` seconds in total."""
        return self.pause_s + max(self.slowdown_s, self.overlapped_s - steps_s)


def measure_s(work: Callable[[], object]) -> float:
    """Return the duration of `work`."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
