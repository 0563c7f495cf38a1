"""A plan says what it was weighed against."""

from __future__ import annotations

import pytest
from profiles import GIB, Card, Network, curve, fleet, profile, steady

from gpumix.planner.explain import plan
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Plan


def two_classes(slow=3.0, **changes):
    cards = [Card("fast", 1, GIB, steady(1.0)), Card("slow", 1, GIB, steady(slow))]
    return profile(cards, **changes)


def test_the_alternatives_and_why_they_lost():
    best = plan(two_classes(), 8)
    found = {a.strategy: a for a in best.alternatives}
    assert set(found) == {"even", "only fast", "only slow"}
    assert found["even"].step_s == pytest.approx(2 * best.prediction.step_s)
    assert found["even"].why.startswith("2.00 times the step time: slow-0 (slow) computes 4")
    assert found["only fast"].step_s == pytest.approx(8 / 6 * best.prediction.step_s)


def test_an_even_plan_is_held_against_the_optimal_one():
    even = plan(two_classes(), 8, strategy="even")
    optimal = next(a for a in even.alternatives if a.strategy == "optimal")
    assert optimal.step_s == pytest.approx(even.prediction.step_s / 2)
    assert optimal.why.startswith("faster")


def test_mixing_that_does_not_pay_is_said():
    wire = Network(gather={"broadcast": curve(50.0)}, reduce={"all_to_all": curve(50.0)})
    best = plan(two_classes(network=wire), 8)
    alone = next(a for a in best.alternatives if a.strategy == "only fast")
    assert alone.step_s < best.prediction.step_s
    assert alone.why.startswith("faster than the chosen plan")


def test_an_alternative_that_does_not_fit_says_by_how_much():
    best = plan(fleet(4), 64)
    assert all(a.step_s is None for a in best.alternatives)
    assert all("short of" in a.why for a in best.alternatives)


def test_one_class_has_no_subsets():
    best = plan(profile([Card("c", 2, GIB, steady(1.0))]), 8)
    assert [a.strategy for a in best.alternatives] == ["even"]
    assert best.alternatives[0].why.startswith("as fast")


def test_a_plan_survives_its_file(tmp_path):
    best = plan(fleet(8), 100)
    best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == best


def test_workers_stand_in_rank_order():
    setting = two_classes()
    devices = tuple(
        d.model_copy(update={"host": host}) for d, host in zip(setting.cluster.devices, "ba")
    )
    cluster = setting.cluster.model_copy(update={"devices": devices})
    best = plan(setting.model_copy(update={"cluster": cluster}), 8)
    assert [(w.host, w.device) for w in best.workers] == [("a", "slow-0"), ("b", "fast-0")]


def test_an_unknown_strategy_is_refused():
    with pytest.raises(InputError, match="no strategy 'magic'"):
        plan(two_classes(), 8, strategy="magic")


def test_no_plan_at_all_is_an_error():
    with pytest.raises(NoFeasiblePlanError):
        plan(fleet(4, memory_factor=0.2), 64)
