"""Whether a change made steps shorter: from pairs of windows, one before and one after, that ran in
turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WORTH = 1.02  # times as fast; less is not worth a setting
PAIRS = 5  # the range of five holds the median with a probability of 94 %


@dataclass(frozen=True)
class Gain:
    """How many times as fast steps are: the median of all pairs of windows, and their range, which
    holds it with `confidence`."""

    factor: float
    low: float
    high: float
    pairs: int

    @property
    def confidence(self) -> float:
        """Of the range: all of n pairs lie on one side of the median in 2 of 2^n cases."""
        return 1.0 - 2.0 ** (1 - self.pairs)

    @property
    def real(self) -> bool:
        """Whether it is a gain whatever the windows' spread."""
        return self.low > 1.0 and self.factor >= WORTH

    def __str__(self) -> str:
        return f"{self.factor:.2f} times as fast ({self.low:.2f} to {self.high:.2f})"


def gain_of(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """Of seconds per step, pair by pair."""
    factors = sorted(before / after for before, after in zip(before_s, after_s, strict=True))
    return Gain(median(factors), factors[0], factors[-1], len(factors))


def hopeless(before_s: Sequence[float], after_s: Sequence[float]) -> bool:
    """Whether more pairs are not worth their time: most of several show no gain."""
    found = gain_of(before_s, after_s)
    return found.pairs >= 3 and found.factor < 1.0 + (WORTH - 1.0) / 2
