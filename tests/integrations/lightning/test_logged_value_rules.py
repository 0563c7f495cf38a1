"""How a logged value of a batch comes from those of its parts."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from gpumix.integrations.lightning.logged_value_rules import (
    MAX_COMPARISONS,
    CombiningRules,
    LoggedPart,
    find_fitting_rules,
)

SAMPLES = [1.0, 5.0, 3.0]
LABELS = [2.0, 4.0, 1.0]
WEIGHTS = [1.0, 0.5, 3.0]


def mean(values: list[float], weights: list[float]) -> float:
    return sum(v * w for v, w in zip(values, weights)) / sum(weights)


LOGGED = {
    "mean": lambda x, w: mean(x, w),
    "samples": lambda x, w: sum(x) / len(x),
    "divided": lambda x, w: mean(x, [WEIGHTS[LABELS.index(one)] for one in w]),
    "sum": lambda x, w: sum(x),
    "max": lambda x, w: max(x),
    "min": lambda x, w: min(x),
}


def part(rows: slice, log, labels=LABELS) -> LoggedPart:
    values, weights = SAMPLES[rows], labels[rows]
    counts = {"mean": sum(weights), "divided": sum(WEIGHTS[rows]), "samples": float(len(values))}
    return LoggedPart({"value": log(values, LABELS[rows])}, {"value": counts})


def ways_of(log, reduced="mean", labels=LABELS) -> list[str]:
    whole, *parts = (part(rows, log, labels) for rows in (slice(3), slice(1), slice(1, 3)))
    return find_fitting_rules(whole, tuple(parts), {"value": reduced})["value"]


@pytest.mark.parametrize("reduced", ["mean", "sum"])
@pytest.mark.parametrize("way", LOGGED)
def test_the_way_is_found_whatever_steps_are_reduced_by(way, reduced):
    assert ways_of(LOGGED[way], reduced) == [way]


def test_ways_that_differ_by_no_sample_are_rivals():
    assert ways_of(LOGGED["samples"], labels=[1.0, 1.0, 1.0]) == ["mean", "samples"]


def test_a_value_that_no_way_gives_is_combined_as_the_module_says():
    ways = CombiningRules()
    assert ways.take({"value": ways_of(lambda x, w: max(x) * min(x) + len(x))}) == ["value"]
    assert ways.of("value", "max") == ["max"]
    assert not ways.may_compare("value")


def test_several_ways_that_fit_are_told_apart_by_later_batches():
    ways = CombiningRules()
    assert not ways.take({"value": ["mean", "sum"]}, ["value"])
    assert ways.of("value", "mean") == ["mean", "sum"]
    assert ways.may_compare("value")
    ways.take({"value": ["sum", "max"]}, ["value"])
    assert ways.of("value", "mean") == ["sum"]
    assert not ways.may_compare("value")


def test_they_are_not_compared_for_ever():
    ways = CombiningRules()
    for _ in range(MAX_COMPARISONS):
        assert ways.may_compare("value")
        ways.take({"value": ["max", "mean"]}, ["value"])
    assert not ways.may_compare("value")
    assert ways.of("value", "mean") == ["max", "mean"]
