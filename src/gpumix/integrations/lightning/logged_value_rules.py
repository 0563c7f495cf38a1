"""Combination of a batch's logged values from values of its parts, found by comparison.

A module may log anything: a mean, a count, a maximum. A step computes the batch in micro-batches,
and the module logs each. As with losses, a few samples are computed at once and in two unequal
parts; the rules reproducing the full value are kept. Rules that no samples have told apart stay
alternative rules; a batch for which they differ is compared before its values are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MEAN, SAMPLES, SUM, MAX, MIN = "mean", "samples", "sum", "max", "min"
DIVIDED = "divided"  # a mean weighted by the denominators in the values' graphs
LOSS = "loss"  # a mean weighted like the loss, although the module gives a `batch_size`
UNWEIGHTED = (SUM, MAX, MIN)  # all other rules are means
MAX_COMPARISONS = 24  # of a value, until the first of its alternative rules is taken
RELATIVE, ABSOLUTE = 1e-4, 1e-7


@dataclass(frozen=True)
class LoggedPart:
    """Values logged for some samples.

    Attributes:
        values: by name.
        weights: by name, the value's weight by each rule that is a mean; NaN if unknown.
    """

    values: Mapping[str, float]
    weights: Mapping[str, Mapping[str, float]]


class CombiningRules:
    """Rules combining values of parts, by name."""

    def __init__(self) -> None:
        self._ways: dict[str, list[str]] = {}  # rules that fitted all comparisons
        self._left: dict[str, int] = {}  # further comparisons

    @property
    def found(self) -> set[str]:
        """Rules in use, alternative rules too."""
        return {way for ways in self._ways.values() for way in ways}

    @property
    def needs_graphs(self) -> bool:
        """Whether the denominators of some values are known by their graphs alone."""
        return [DIVIDED] in self._ways.values()

    def is_compared(self, name: str) -> bool:
        """Return whether a name's values were compared."""
        return name in self._ways

    def of(self, name: str, reduced: str, *, reads_graphs: bool = True) -> list[str]:
        """Return the rules for a name, the likeliest first.

        Args:
            reduced: the module's own choice, for values that no rule fits.
            reads_graphs: whether the batch's graphs are known.
        """
        ways = [way for way in self._ways.get(name, ()) if reads_graphs or way != DIVIDED]
        return ways or [reduced]

    def may_compare(self, name: str) -> bool:
        """Return whether a further comparison can narrow the rules of a name."""
        ways = self._ways.get(name)
        return self._left.get(name, MAX_COMPARISONS) > 0 and (ways is None or len(ways) > 1)

    def take(self, fitting: Mapping[str, list[str]], compared: Iterable[str] = ()) -> list[str]:
        """Narrow the rules by those fitting the samples of a comparison; return names without any
        rule left.

        Args:
            compared: names for whose sake the comparison was made.
        """
        lost = []
        for name in compared:
            self._left[name] = self._left.get(name, MAX_COMPARISONS) - 1
        for name, ways in fitting.items():
            before = self._ways.get(name, ways)
            if before or name not in self._ways:
                self._ways[name] = [way for way in before if way in ways]
                lost += [] if self._ways[name] else [name]
        return lost


def is_alike(values: Sequence[float]) -> bool:
    """Return whether values are equal within what a comparison can tell; NaN equals NaN."""
    first = values[0]
    return all(
        math.isclose(one, first, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        or (math.isnan(one) and math.isnan(first))
        for one in values
    )


def find_fitting_rules(
    whole: LoggedPart, parts: tuple[LoggedPart, LoggedPart], reduced: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return rules that reproduce the full value, by name, the likeliest first.

    Args:
        reduced: the module's choice for each name.
    """
    found = {}
    for name, value in whole.values.items():
        if math.isfinite(value) and all(name in part.values for part in parts):
            weights = [part.weights[name] for part in parts]
            found[name] = _fit_rules(
                value, [part.values[name] for part in parts], weights, reduced[name]
            )
    return found


def _fit_rules(
    whole: float, values: Sequence[float], weights: Sequence[Mapping[str, float]], reduced: str
) -> list[str]:
    told = {way: _mean(values, [own[way] for own in weights]) for way in weights[0]}
    if not any(map(math.isnan, values)):
        told |= {SUM: math.fsum(values), MAX: max(values), MIN: min(values)}
    # What a value is divided by is known by its graph; else the module's choice is the likeliest.
    first = (*([] if reduced == MEAN else [reduced]), DIVIDED, MEAN, LOSS, SAMPLES, SUM)
    order = sorted(told, key=lambda way: first.index(way) if way in first else len(first))
    return [
        way for way in order if math.isclose(told[way], whole, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    ]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    if not total:
        return math.nan
    return math.fsum(v * w for v, w in zip(values, weights) if w) / total
