"""Whether losses say that two windows train the same."""

from __future__ import annotations

import random

import pytest

from gpumix.doctor.function.alike import unlike

LOSSES = [2.0, 1.9, 1.8, 1.75, 1.7, 1.6, 1.5, 1.4, 1.3]


def times(factor: float) -> list[float]:
    return [factor * one for one in LOSSES]


@pytest.mark.parametrize("changes", [{"fused"}, {"threads"}, {"recompute"}, {"late_values"}])
def test_what_only_rounds(changes):
    assert unlike(LOSSES, times(1.0001), changes) == ""
    assert "2.0%" not in unlike(LOSSES, times(1.0001), changes)
    assert "differ" in unlike(LOSSES, times(1.02), changes)


def test_half_precision_rounds_more():
    assert unlike(LOSSES, times(1.01), {"autocast"}) == ""
    assert "differ" in unlike(LOSSES, times(1.1), {"autocast"})


def test_losses_without_a_meaning_tell_nothing():
    broken = [2.0, float("nan"), float("inf")]
    assert unlike(broken, broken, {"fused"}) == ""
    assert unlike(LOSSES, broken, {"fused"}) == "losses are not finite"


def test_later_losses_may_drift():
    drifted = [*LOSSES[:8], 5.0]
    assert unlike(LOSSES, drifted, {"fused"}) == ""


def test_what_draws_samples_anew_is_alike_in_the_mean():
    draw = random.Random(0).gauss
    one, other = ([2.0 + draw(0, 0.3) for _ in range(30)] for _ in range(2))
    assert unlike(one, other, {"num_workers"}) == ""
    assert "differ" in unlike(one, other, {"fused"})
    assert "differ" in unlike(one, [loss + 1.0 for loss in other], {"num_workers"})


def test_losses_that_are_not_finite():
    assert "finite" in unlike(LOSSES, [float("nan")] * 9, {"autocast"})


def test_without_losses_nothing_is_known():
    assert unlike((), (), {"autocast"}) == ""
