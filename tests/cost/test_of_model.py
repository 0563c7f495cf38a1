"""A plan that was edited is compared with the model: which unit, which stage, what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from gpumix.cost.model_match import check_settings_have_effect
from gpumix.cost.predict import predict
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from helpers.errors import raises
from helpers.plans.profiles import FREE, GIB, Card, block, in_a_row, profile, root, steady

# Four calls on two cards; the first call and the loss compute with a parameter of the root.
PROFILE = in_a_row(
    profile(
        [Card("one", 1, GIB, steady(1.0)), Card("two", 1, GIB, steady(1.0))],
        calls=("block",) * 4,
        kinds=[block()],
        root_unit=root(8),
    ),
    message=FREE,
    tied=8,
)


@pytest.fixture(scope="module")
def made() -> Plan:
    space = Space(
        min_pipeline_stages=2, max_pipeline_stages=2, pipeline_schedules="1f1b", leave_out=False
    )
    return make_plan(PROFILE, 4, space=space)


def edited(plan: Plan, number: int, **changes: Any) -> Plan:
    """As a person edits it: its JSON, read again."""
    tree = plan.model_dump(mode="json")
    tree["stages"][number] |= changes
    return Plan.model_validate(tree)


def test_a_plan_as_it_was_made_is_predicted_again_alike(made):
    again = predict(PROFILE, made)
    assert made.prediction is not None
    assert again == made.prediction.model_copy(update={"bound_s": None})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"units": ["layers.2", "other"]}, {"code": "plan-unit-unknown", "what": "other"}),
        ({"root": []}, {"code": "stage-root-incomplete", "what": ("tied.weight", "root")}),
        ({"root": ["tied.weight", "x"]}, {"code": "stage-root-unknown", "what": ("root", "x")}),
        ({"before": ["tied.weight"]}, {"code": "plan-key-conflict", "what": "before"}),
    ],
)
def test_stages_that_are_not_the_models_are_refused(made, changes, told):
    with raises(InputError, **told):
        predict(PROFILE, edited(made, 1, **changes))


def test_a_stage_takes_all_that_its_units_need(made):
    takes = [taken.model_dump() | {"output": 1} for taken in made.stages[1].takes]
    with raises(InputError, code="stage-takes-incomplete", what=(0, "layers.1")) as caught:
        predict(PROFILE, edited(made, 1, takes=takes))
    assert caught.value.where == "stage 2"


def test_all_of_the_root_is_enough(made):
    assert predict(PROFILE, edited(made, 1, root=None)).step_s > 0


@pytest.mark.parametrize(
    ("units", "told"),
    [
        ((0, 1, 3), {"code": "plan-unit-missing", "what": "layers.2"}),
        ((0, 2, 1, 3), {"code": "plan-model-mismatch", "what": ("layers.1", "layers.2", 2)}),
        ((0, 1, 2, 3, 3), {"code": "plan-model-mismatch", "what": "layers.3"}),
    ],
)
def test_the_unit_that_is_wrong_is_named(units, told):
    plan = make_plan(PROFILE, 4, space=Space(max_pipeline_stages=1))
    with raises(InputError, **told):
        predict(PROFILE, edited(plan, 0, units=[f"layers.{n}" for n in units]))


def test_ends_name_what_only_they_use():
    one = make_plan(PROFILE, 4, space=Space(max_pipeline_stages=1, leave_out=False))
    with raises(InputError, code="plan-key-conflict", what=("after", "tied.weight")):
        predict(PROFILE, edited(one, 0, after=["tied.weight"]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kept_graphs": 2}, {"code": "kept-graphs-in-stages", "what": ("kept_graphs", 2)}),
        ({"mode": {"recompute": True, "order": "sequential"}}, {"code": "plan-order-in-stages"}),
    ],
)
def test_what_would_have_no_effect_is_refused(made, changes, told):
    (worker,) = made.model_dump(mode="json")["stages"][0]["workers"]
    wanted = {"samples": 4, "micro_batch": 1, "mode": {"recompute": True}} | changes
    with raises(InputError, **told):
        check_settings_have_effect(edited(made, 0, workers=[worker | wanted]))


def test_more_graphs_than_there_are_cannot_be_kept():
    one = make_plan(PROFILE, 4, space=Space(max_pipeline_stages=1, gradient_checkpointing=(True,)))
    workers = one.model_dump(mode="json")["stages"][0]["workers"]
    workers[0]["kept_graphs"] = 1 + 4 * len(one.workers[0].micro_batches)
    with raises(InputError, code="kept-graphs-out-of-range", what="kept_graphs"):
        check_settings_have_effect(edited(one, 0, workers=workers))


def test_a_schedule_that_would_split_nothing_is_refused(made):
    tree = made.model_dump(mode="json") | {"schedule": "zero-bubble"}
    workers = [worker for stage in tree["stages"] for worker in stage["workers"]]
    for worker in workers:
        worker["mode"] = {"recompute": True}
    with raises(InputError, code="zero-bubble-kept-graphs"):
        check_settings_have_effect(Plan.model_validate(tree))
    workers[0]["mode"] = {"recompute": False}
    check_settings_have_effect(Plan.model_validate(tree))


def test_in_waves_a_stage_splits_where_all_of_its_devices_keep_graphs(made):
    tree = made.model_copy(update={"prediction": None, "reasons": None}).model_dump(mode="json")
    tree |= {"schedule": "zero-bubble", "zero_stage": 2}
    for stage in tree["stages"]:
        (one,) = stage["workers"]
        half = one | {"samples": 2, "micro_batch": 2, "state_share": 0.5}
        stage["workers"] = [
            half | {"device": f"{one['device']} {n}", "mode": {"recompute": n == 0}}
            for n in range(2)
        ]
    with raises(InputError, code="zero-bubble-kept-graphs"):
        check_settings_have_effect(Plan.model_validate(tree))
    tree["stages"][0]["workers"][0]["mode"] = {"recompute": False}
    check_settings_have_effect(Plan.model_validate(tree))
