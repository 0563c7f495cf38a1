"""A range of values, from minimum to maximum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The minimum and maximum of several values."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        known = list(values)
        return cls(min(known), max(known))

    @property
    def alike(self) -> bool:
        return self.most - self.least <= 1e-3 * max(abs(self.most), 1e-12)

    def format_with(self, as_: Callable[[float], str]) -> str:
        """Format the range; equal ends are shown once."""
        least, most = as_(self.least), as_(self.most)
        return most if self.alike or least == most else f"{least} to {most}"
