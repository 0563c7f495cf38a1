"""Whether losses say that two windows train the same."""

from __future__ import annotations

import random

import pytest

from gpumix.doctor.function.loss_comparison import describe_loss_difference

LOSSES = [2.0, 1.9, 1.8, 1.75, 1.7, 1.6, 1.5, 1.4, 1.3]


def times(factor: float) -> list[float]:
    return [factor * one for one in LOSSES]


@pytest.mark.parametrize("changes", [{"fused"}, {"threads"}, {"recompute"}, {"late_values"}])
def test_what_only_rounds(changes):
    assert describe_loss_difference(LOSSES, times(1.0001), changes) == ""
    assert "2.0%" not in describe_loss_difference(LOSSES, times(1.0001), changes)
    assert "differ" in describe_loss_difference(LOSSES, times(1.02), changes)


def test_half_precision_rounds_more():
    assert describe_loss_difference(LOSSES, times(1.01), {"autocast"}) == ""
    assert "differ" in describe_loss_difference(LOSSES, times(1.1), {"autocast"})


def test_losses_without_a_meaning_tell_nothing():
    broken = [2.0, float("nan"), float("inf")]
    assert describe_loss_difference(broken, broken, {"fused"}) == ""
    assert describe_loss_difference(LOSSES, broken, {"fused"}) == "losses are not finite"


def test_later_losses_may_drift():
    drifted = [*LOSSES[:8], 5.0]
    assert describe_loss_difference(LOSSES, drifted, {"fused"}) == ""


def test_what_draws_samples_anew_is_alike_in_the_mean():
    draw = random.Random(0).gauss
    one, other = ([2.0 + draw(0, 0.3) for _ in range(30)] for _ in range(2))
    assert describe_loss_difference(one, other, {"num_workers"}) == ""
    assert "differ" in describe_loss_difference(one, other, {"fused"})
    assert "differ" in describe_loss_difference(
        one, [loss + 1.0 for loss in other], {"num_workers"}
    )


def test_losses_that_are_not_finite():
    assert "finite" in describe_loss_difference(LOSSES, [float("nan")] * 9, {"autocast"})


def test_what_is_to_train_otherwise():
    assert describe_loss_difference(LOSSES, times(1.5), {"reuse_optimizer"}) == ""
    assert "finite" in describe_loss_difference(LOSSES, [float("inf")], {"reuse_optimizer"})


def test_without_losses_nothing_is_known():
    assert describe_loss_difference((), (), {"autocast"}) == ""
