"""All strategies side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.compare import Comparison, compare
from gpumix.planner.plan import STRATEGIES
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.profile.profile import Profile
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import small_profiles
from helpers.plans.policies import peaked
from helpers.plans.profiles import GIB, Card, fleet, profile, steady

EASY = examples(4)


def two_classes() -> Profile:
    return peaked(profile([Card("fast", 1, GIB, steady(1.0)), Card("slow", 1, GIB, steady(3.0))]))


def test_a_row_for_each_strategy_and_why_it_lost():
    made = compare(two_classes(), PlanRequest(global_batch=8))
    rows = {row.strategy: row for row in made.rows}
    assert list(rows) == list(STRATEGIES)
    assert (made.best, made.global_batch) == ("optimal", 8)
    assert rows["optimal"].why == "the fastest"
    assert rows["poplar"].why == "as fast as the chosen plan"
    assert rows["even"].why.startswith("2.00 times the step time: slow-0 (slow) computes 4")
    assert rows["best-subset"].why.startswith("1.33 times the step time: fast-0")
    assert rows["even"].step_s == pytest.approx(2 * rows["optimal"].step_s)
    assert rows["even"].tokens_per_s == pytest.approx(8 * 128 / rows["even"].step_s)
    others = (row for row in made.rows if row.step_s is not None and row.strategy != "optimal")
    assert {row.zero_stage for row in others} == {3}
    assert {row.strategy for row in made.rows if row.step_s is None} == {"staged", "model"}
    assert "does not say what the model's units need" in rows["staged"].why


def test_why_a_model_has_no_stages():
    profile = two_classes()
    model = profile.model.model_copy(update={"no_stages": "unit 'a' goes by values"})
    made = compare(profile.model_copy(update={"model": model}), PlanRequest(global_batch=8))
    rows = {row.strategy: row for row in made.rows}
    for name in ("staged", "model"):
        assert rows[name].why == "there is no plan of several stages: unit 'a' goes by values"
    assert made.best == "optimal"


def test_head_room_is_the_least_of_each_class():
    profile = fleet(8, memory_factor=2, layers=8)
    request = PlanRequest(global_batch=100)
    plan = STRATEGIES["optimal"](profile, request)
    row = compare(profile, request).rows[0]
    assert [room.device_class for room in row.head_room] == ["a100", "a6000", "l4", "t4"]
    for room in row.head_room:
        left = [
            p.memory_limit_bytes - p.peak_bytes
            for w, p in zip(plan.workers, plan.prediction.workers)
            if w.device_class == room.device_class
        ]
        limit = plan.prediction.workers[0].memory_limit_bytes
        assert room.free_bytes == min(left)
        if room.device_class == "a100":
            assert room.part == pytest.approx(min(left) / limit)


def test_a_class_that_is_left_out_has_no_head_room():
    made = compare(two_classes(), PlanRequest(global_batch=8))
    assert [room.device_class for room in made.rows[-1].head_room] == ["fast"]


@pytest.mark.extended
def test_what_is_not_possible_says_why():
    made = compare(fleet(4, memory_factor=0.8), PlanRequest(global_batch=64))
    rows = {row.strategy: row for row in made.rows}
    assert "short of" in rows["even"].why
    assert "peak FLOP/s of device class 'a100' is not known" in rows["proportional"].why
    assert (rows["even"].step_s, rows["even"].head_room) == (None, ())


@pytest.mark.extended
def test_without_any_plan_the_first_error_stands():
    with raises(NoFeasiblePlanError, code="no-plan-fits", what=64):
        compare(fleet(4, memory_factor=0.2), PlanRequest(global_batch=64))


def test_an_unknown_device_is_refused():
    with raises(InputError, code="device-not-in-profile", what="gone"):
        compare(fleet(4), PlanRequest(global_batch=64, devices=("gone",)))


@EASY
@given(small_profiles(), st.integers(1, 12))
def test_the_best_row_is_the_fastest(profile, batch):
    try:
        made = compare(peaked(profile), PlanRequest(global_batch=batch))
    except (InputError, NoFeasiblePlanError):
        return
    steps = {row.strategy: row.step_s for row in made.rows if row.step_s is not None}
    assert steps[made.best] == min(steps.values())
    assert Comparison.model_validate_json(made.model_dump_json()) == made


def test_a_plan_is_not_weighed_against_every_strategy():
    made = make_plan(two_classes(), 8, strategy="poplar")
    assert [a.strategy for a in made.reasons.alternatives] == [
        "optimal",
        "even",
        "only fast",
        "only slow",
    ]
