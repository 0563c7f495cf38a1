"""How a value of a batch comes from values of its parts, found by a comparison.

A module logs what it likes of a batch: a mean, a count, the largest of something. A step computes
the batch in micro-batches, and the module logs each. As with losses, a few samples are computed at
once and in two unlike parts; the way that gives the value of the whole is the one that is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MEAN, SAMPLES, SUM, MAX, MIN = "mean", "samples", "sum", "max", "min"
DIVIDED = "divided"  # a mean over what the value's own graph says that it is divided by
MEANS = (MEAN, SAMPLES, DIVIDED)
TRIES = 8  # batches, until the first of several ways that fit is taken
RELATIVE, ABSOLUTE = 1e-4, 1e-7


@dataclass(frozen=True)
class Part:
    """What was logged of some samples.

    Attributes:
        values: by name, with the weight of each in a mean, and what its graph says that it is
            divided by; NaN if it says nothing.
        samples: how many there are.
    """

    values: Mapping[str, tuple[float, float, float]]
    samples: int


class Ways:
    """By name, the way in which values of parts are combined."""

    def __init__(self) -> None:
        self._ways: dict[str, list[str]] = {}  # those that fitted all batches that were compared
        self._left: dict[str, int] = {}  # how many more may be
        self._compared = False

    @property
    def is_open(self) -> bool:
        """Whether another batch should be compared."""
        return not self._compared or any(self._left.values())

    @property
    def found(self) -> set[str]:
        """The ways that values are combined in."""
        return {ways[0] for ways in self._ways.values() if ways}

    def of(self, name: str, reduced: str) -> str:
        """
        Args:
            reduced: what the module says, for values that no way gives.
        """
        ways = self._ways.get(name)
        return ways[0] if ways else reduced

    def take(self, fitting: Mapping[str, list[str]]) -> list[str]:
        """Learn the ways that fit, by name, of a batch; the names for which none is left."""
        self._compared, lost = True, []
        for name, ways in fitting.items():
            left = self._left.get(name, TRIES)
            if left:
                before = self._ways.get(name, ways)
                self._ways[name] = [way for way in before if way in ways]
                self._left[name] = left - 1 if len(self._ways[name]) > 1 else 0
                lost += [] if self._ways[name] else [name]
        return lost


def fitting_ways(
    whole: Part, parts: tuple[Part, Part], reduced: Mapping[str, str]
) -> dict[str, list[str]]:
    """By name, the ways that give the value of the whole, the likeliest first.

    Args:
        reduced: what the module says of each name.
    """
    found = {}
    for name, (value, *_) in whole.values.items():
        if math.isfinite(value) and all(name in part.values for part in parts):
            own = [(*part.values[name], float(part.samples)) for part in parts]
            found[name] = _ways(value, own, reduced[name])
    return found


def _ways(whole: float, parts: Sequence[tuple[float, ...]], reduced: str) -> list[str]:
    values, weights, divided, samples = zip(*parts)
    told = {
        MEAN: _mean(values, weights),
        SAMPLES: math.nan if _alike(weights, samples) else _mean(values, samples),
        DIVIDED: math.nan if _alike(weights, divided) else _mean(values, divided),
        SUM: math.fsum(values),
        MAX: max(values),
        MIN: min(values),
    }
    order = sorted(told, key=lambda way: way != reduced)
    return [
        way for way in order if math.isclose(told[way], whole, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    ]


def _alike(weights: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return math.isclose(weights[0] * others[1], weights[1] * others[0])


def _mean(values: tuple[float, ...], weights: tuple[float, ...]) -> float:
    total = math.fsum(weights)
    if not total:
        return math.nan
    return math.fsum(v * w for v, w in zip(values, weights) if w) / total
