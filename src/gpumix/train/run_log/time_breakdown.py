"""Values for the time spent in training steps. `step_timer`, which measures, imports torch; readers
of the values need not."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TimeShares:
    """Parts of a time, adding up to 1. A device's idle gaps between the small kernels of a step
    count as computing."""

    compute: float
    input: float
    communication: float
    copies: float
    other: float


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of some steps by cause."""

    steps: int
    compute: float
    input: float
    communication: float
    copies: float
    other: float

    @property
    def seconds(self) -> float:
        return sum(getattr(self, one.name) for one in fields(TimeShares))

    @classmethod
    def of(
        cls, steps: int, gap: float, starved: float, busy: float, waits: float, copying: float
    ) -> TimeBreakdown:
        """Build from the time before devices compute, the loader's part of it, and the time after,
        with waits and copies."""
        return cls(steps, busy - waits - copying, starved, waits, copying, gap - starved)

    def and_then(self, later: TimeBreakdown) -> TimeBreakdown:
        """Return the account of both ranges of steps."""
        return TimeBreakdown(
            *(getattr(self, f.name) + getattr(later, f.name) for f in fields(self))
        )

    def shares(self) -> TimeShares:
        whole = self.seconds
        if whole <= 0:
            return TimeShares(1.0, 0.0, 0.0, 0.0, 0.0)
        return TimeShares(*(getattr(self, one.name) / whole for one in fields(TimeShares)))
