"""Whether a change made steps shorter: from pairs of windows, one before and one after, that ran in
turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

WORTH = 1.02  # times as fast; less is not worth a setting
PAIRS = 5  # the range of five holds the median with a probability of 94 %
MOST_PAIRS = 2.5  # times as many, where a few windows that were disturbed hide what the others show
CONFIDENCE = 0.92  # that an interval has, if there are pairs enough


@dataclass(frozen=True)
class Gain:
    """How many times as fast steps are: the median of all pairs of windows, and an interval that
    holds it with `confidence`."""

    factor: float
    low: float
    high: float
    pairs: int

    @property
    def confidence(self) -> float:
        """Of the interval."""
        return _confidence(self.pairs, _left_out(self.pairs))

    @property
    def real(self) -> bool:
        """Whether it is a gain whatever the windows' spread."""
        return self.low > 1.0 and self.factor >= WORTH

    def __str__(self) -> str:
        return f"{self.factor:.2f} times as fast ({self.low:.2f} to {self.high:.2f})"


def gain_of(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """Of seconds per step, pair by pair."""
    factors = sorted(before / after for before, after in zip(before_s, after_s, strict=True))
    out = _left_out(len(factors))
    return Gain(median(factors), factors[out], factors[-1 - out], len(factors))


def enough(before_s: Sequence[float], after_s: Sequence[float], pairs: int) -> bool:
    """Whether more windows are not worth their time: most of several show no gain, or `pairs` of
    them agree, or more do not make them agree."""
    if len(before_s) < 3:
        return False
    found = gain_of(before_s, after_s)
    if found.factor < 1.0 + (WORTH - 1.0) / 2:
        return True
    if found.pairs < pairs:
        return False
    return found.real or found.factor < WORTH or found.pairs >= round(MOST_PAIRS * pairs)


def _left_out(pairs: int) -> int:
    """How many pairs at either end the interval leaves out: as many as `CONFIDENCE` allows."""
    out = 0
    while _confidence(pairs, out + 1) >= CONFIDENCE:
        out += 1
    return out


def _confidence(pairs: int, out: int) -> float:
    """That the median of all pairs there could be lies between the ones that are left: each pair
    lies on either side of it with equal chance."""
    return 1.0 - 2.0 ** (1 - pairs) * sum(comb(pairs, k) for k in range(out + 1))
