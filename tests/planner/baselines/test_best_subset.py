"""The best single class."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumix.planner.baselines.best_subset import plan_best_subset
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.errors import NoFeasiblePlanError
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import small_profiles
from helpers.plans.policies import plan_by
from helpers.plans.profiles import GIB, Card, fleet, profile, steady

MANY = examples(4)


@MANY
@given(small_profiles(), st.integers(1, 12))
def test_it_is_the_fastest_of_the_optimal_plans_of_each_class(profile, batch):
    steps = []
    for device_class in profile.cluster.classes:
        alone = tuple(d.id for d in profile.cluster.members(device_class.name))
        try:
            plan = plan_one_stage(profile, PlanRequest(global_batch=batch, devices=alone))
        except NoFeasiblePlanError:
            continue
        steps.append(plan.prediction.step_s)
    found = plan_by(plan_best_subset, profile, batch)
    assert (found and found.prediction.step_s) == min(steps, default=None)
    assert found is None or len({w.device_class for w in found.workers}) == 1


def test_two_slow_cards_can_beat_a_fast_one():
    cards = [Card("fast", 1, GIB, steady(1.0)), Card("slow", 3, GIB, steady(2.0))]
    plan = plan_best_subset(profile(cards), PlanRequest(global_batch=12))
    assert [(w.device_class, w.samples) for w in plan.workers] == [("slow", 4)] * 3


def test_of_equally_fast_classes_the_first_by_name_wins():
    cards = [Card("b", 1, GIB, steady(1.0)), Card("a", 1, GIB, steady(1.0))]
    plan = plan_best_subset(profile(cards), PlanRequest(global_batch=4))
    assert [w.device_class for w in plan.workers] == ["a"]


def test_every_class_says_what_it_lacks():
    with raises(NoFeasiblePlanError, code="no-class-fits-alone") as caught:
        plan_best_subset(fleet(4), PlanRequest(global_batch=64))
    for name in ("a100", "a6000", "l4", "t4"):
        assert f"only {name}: " in caught.value.why
    assert caught.value.why.count("short of") == 4
