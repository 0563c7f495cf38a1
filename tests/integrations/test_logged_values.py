"""How a logged value of a batch comes from those of its parts."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from gpumix.integrations.lightning.combining import (
    MAX_COMPARED_BATCHES,
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


def part(rows: slice, log) -> LoggedPart:
    values, weights = SAMPLES[rows], LABELS[rows]
    return LoggedPart(
        {"value": (log(values, weights), sum(weights), sum(WEIGHTS[rows]))}, len(values)
    )


def ways_of(log, reduced="mean") -> list[str]:
    parts = part(slice(0, 1), log), part(slice(1, 3), log)
    return find_fitting_rules(part(slice(0, 3), log), parts, {"value": reduced})["value"]


@pytest.mark.parametrize("reduced", ["mean", "sum"])
@pytest.mark.parametrize("way", LOGGED)
def test_the_way_is_found_whatever_steps_are_reduced_by(way, reduced):
    assert ways_of(LOGGED[way], reduced) == [way]


def test_a_value_that_no_way_gives_is_combined_as_the_module_says():
    ways = CombiningRules()
    assert ways.take({"value": ways_of(lambda x, w: max(x) * min(x) + len(x))}) == ["value"]
    assert ways.of("value", "max") == "max"
    assert not ways.needs_comparison


def test_several_ways_that_fit_are_told_apart_by_later_batches():
    ways = CombiningRules()
    assert not ways.take({"value": ["mean", "sum"]})
    assert ways.of("value", "mean") == "mean"
    assert ways.needs_comparison
    ways.take({"value": ["sum", "max"]})
    assert ways.of("value", "mean") == "sum"
    assert not ways.needs_comparison


def test_they_are_not_compared_for_ever():
    ways = CombiningRules()
    for _ in range(MAX_COMPARED_BATCHES):
        assert ways.needs_comparison
        ways.take({"value": ["max", "mean"]})
    assert not ways.needs_comparison
    assert ways.of("value", "mean") == "max"
