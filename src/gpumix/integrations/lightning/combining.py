"""Combination of a batch's logged values from values of its parts, found by comparison.

A module may log anything: a mean, a count, a maximum. A step computes the batch in micro-batches,
and the module logs each. As with losses, a few samples are computed at once and in two unequal
parts; the rule reproducing the full value is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MEAN, SAMPLES, SUM, MAX, MIN = "mean", "samples", "sum", "max", "min"
DIVIDED = "divided"  # a mean weighted by the denominators in the values' graphs
LOSS = "loss"  # a mean weighted like the loss, although the module gives a `batch_size`
MEANS = (MEAN, SAMPLES, LOSS, DIVIDED)
MAX_COMPARED_BATCHES = 8  # batches, until the first of several fitting rules is taken
RELATIVE, ABSOLUTE = 1e-4, 1e-7


@dataclass(frozen=True)
class LoggedPart:
    """Values logged for some samples.

    Attributes:
        values: by name, each with its weight in a mean and its graph's denominator; NaN if unknown.
        samples: number of samples.
        weight: of the loss.
    """

    values: Mapping[str, tuple[float, float, float]]
    samples: int
    weight: float = math.nan


class CombiningRules:
    """Rules combining values of parts, by name."""

    def __init__(self) -> None:
        self._ways: dict[str, list[str]] = {}  # rules that fitted all compared batches
        self._left: dict[str, int] = {}  # further batches to compare
        self._compared = False

    @property
    def needs_comparison(self) -> bool:
        """True if another batch should be compared."""
        return not self._compared or any(self._left.values())

    @property
    def found(self) -> set[str]:
        """Rules in use."""
        return {ways[0] for ways in self._ways.values() if ways}

    def of(self, name: str, reduced: str) -> str:
        """Return the rule for a name.

        Args:
            reduced: the module's own choice, for values that no rule fits.
        """
        ways = self._ways.get(name)
        return ways[0] if ways else reduced

    def take(self, fitting: Mapping[str, list[str]]) -> list[str]:
        """Narrow the rules by those fitting a batch; return names without any rule left."""
        self._compared, lost = True, []
        for name, ways in fitting.items():
            left = self._left.get(name, MAX_COMPARED_BATCHES)
            if left:
                before = self._ways.get(name, ways)
                self._ways[name] = [way for way in before if way in ways]
                self._left[name] = left - 1 if len(self._ways[name]) > 1 else 0
                lost += [] if self._ways[name] else [name]
        return lost


def find_fitting_rules(
    whole: LoggedPart, parts: tuple[LoggedPart, LoggedPart], reduced: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return rules that reproduce the full value, by name, the likeliest first.

    Args:
        reduced: the module's choice for each name.
    """
    found = {}
    for name, (value, *_) in whole.values.items():
        if math.isfinite(value) and all(name in part.values for part in parts):
            own = [(*part.values[name], float(part.samples), part.weight) for part in parts]
            found[name] = _fit_rules(value, own, reduced[name])
    return found


def _fit_rules(whole: float, parts: Sequence[tuple[float, ...]], reduced: str) -> list[str]:
    values, weights, divided, samples, of_loss = zip(*parts)
    told = {
        MEAN: _mean(values, weights),
        SAMPLES: math.nan if _alike(weights, samples) else _mean(values, samples),
        LOSS: math.nan if _alike(weights, of_loss) else _mean(values, of_loss),
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
