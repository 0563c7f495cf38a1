"""Verdict on a change: measures its gain from pairs of alternating windows before and after.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

LEAST_SPEEDUP = 1.02  # smallest speedup worth a setting
SLOWER = 0.995  # speedup below which a change is called slower
PAIRS = 5  # the range of five values contains the median with probability 94%
MOST_PAIRS_FACTOR = 2.5  # factor on the number of pairs, if disturbed windows hide the result
CONFIDENCE = 0.92  # minimal confidence of an interval, given enough pairs


@dataclass(frozen=True)
class Gain:
    """Speedup of steps: the median over all pairs of windows, and an interval containing it with
    probability `confidence`."""

    factor: float
    low: float
    high: float
    pairs: int

    @property
    def confidence(self) -> float:
        """Confidence of the interval."""
        return _compute_confidence(self.pairs, _count_dropped_pairs(self.pairs))

    @property
    def real(self) -> bool:
        """Whether the gain is larger than the spread of windows."""
        return self.low > 1.0 and self.factor >= LEAST_SPEEDUP

    def __str__(self) -> str:
        if self.factor < SLOWER:
            return f"{1.0 - self.factor:.0%} slower, not advised"
        found = f"{self.factor:.2f}x as fast ({self.low:.2f} to {self.high:.2f})"
        return found if self.real else f"no clear gain: {found}"


def compute_gain(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """Return the gain from seconds per step, compared in pairs."""
    factors = sorted(before / after for before, after in zip(before_s, after_s, strict=True))
    out = _count_dropped_pairs(len(factors))
    return Gain(median(factors), factors[out], factors[-1 - out], len(factors))


def has_enough_pairs(before_s: Sequence[float], after_s: Sequence[float], pairs: int) -> bool:
    """Return whether more windows are not worth their time: there is no gain, or `pairs` pairs
    agree, or more pairs do not lead to agreement."""
    if len(before_s) < 3:
        return False
    found = compute_gain(before_s, after_s)
    if found.factor < 1.0 + (LEAST_SPEEDUP - 1.0) / 2:
        return True
    if found.pairs < pairs:
        return False
    return (
        found.real
        or found.factor < LEAST_SPEEDUP
        or found.pairs >= round(MOST_PAIRS_FACTOR * pairs)
    )


def _count_dropped_pairs(pairs: int) -> int:
    """Return the number of pairs dropped at either end of the interval, given `CONFIDENCE`."""
    out = 0
    while _compute_confidence(pairs, out + 1) >= CONFIDENCE:
        out += 1
    return out


def _compute_confidence(pairs: int, out: int) -> float:
    """Return the probability that the true median lies within the remaining pairs, if each pair
    lies on either side of it with equal chance."""
    return 1.0 - 2.0 ** (1 - pairs) * sum(comb(pairs, k) for k in range(out + 1))
