"""Tensor-parallel groups of unlike sizes in one stage, where faster or where nothing else fits."""

from __future__ import annotations

import io
from functools import cache

import pytest
from rich.console import Console

from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.plan import STRATEGIES
from gpumix.report.facts import group_workers
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import ROOT, Profile
from gpumix.simulate.events import simulate
from gpumix.train.console.tables import plan_table
from helpers.errors import raises
from helpers.plans.profiles import (
    GIB,
    MIB,
    Card,
    block,
    in_a_row,
    line,
    profile,
    steady,
    with_tp_groups,
)

optimal, even = STRATEGIES["optimal"], STRATEGIES["even"]
ONE_STAGE = {
    "max_pipeline_stages": 1,
    "checkpoints_on": "device",
    "state_on": "device",
    "leave_out": True,
}


def cards(*, memory: int = 40 * MIB, faster: float = 1.8) -> Profile:
    """One that is large, and four small ones, which have no room for a sample alone."""
    kinds = [block(trainable=1_000_000, kept=line(4e6), gradient=line(4e6), backward=line(1.6e7))]
    found = profile(
        [
            Card("large", 1, GIB, steady(1e-3), per_host=1),
            Card("small", 4, memory, steady(2e-3), per_host=4),
        ],
        calls=("block",) * 4,
        kinds=kinds,
    )
    return with_tp_groups(in_a_row(found, message=line(1e4)), 2, faster=faster, divided=faster)


@cache
def planned() -> tuple[Profile, Plan]:
    """Such cards, and the best plan of one stage."""
    found = cards()
    return found, best(found)


def best(found: Profile, batch: int = 8, **space) -> Plan:
    return optimal(found, PlanRequest(global_batch=batch, space=Space(**ONE_STAGE | space)))


def test_small_ones_form_a_group_next_to_a_large_one_that_computes_alone():
    found, plan = planned()
    (stage,) = plan.stages
    assert stage.has_mixed_degrees and stage.tensor == 2
    assert [[w.device_class for w in tp_group] for tp_group in stage.tp_groups] == [
        ["large"], ["small", "small"], ["small", "small"],
    ]  # fmt: skip
    assert all(leader.samples for leader in stage.leaders)
    assert (
        get_prediction(plan).step_s
        < 0.8 * get_prediction(best(found, tensor_parallel_size=1)).step_s
    )
    with pytest.raises(NoFeasiblePlanError):  # the small ones cannot hold all of the state
        best(found, tensor_parallel_size=2)
    for worker in get_prediction(plan).workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes


def test_what_is_foretold_of_it_is_what_the_simulator_replays():
    found, plan = planned()
    again = predict(found, plan)
    assert again.step_s == pytest.approx(get_prediction(plan).step_s, rel=1e-9)
    assert [w.memory_bytes for w in again.workers] == [
        w.memory_bytes for w in get_prediction(plan).workers
    ]
    assert simulate(found, plan).step_s == pytest.approx(again.step_s, rel=0.02)
    assert get_prediction(plan).bound_s <= get_prediction(plan).step_s


def test_devices_with_room_enough_stay_alone():
    assert not best(cards(memory=GIB, faster=1.2)).uses_tensor_parallel


def test_of_three_on_a_host_two_form_a_group_and_one_computes_alone():
    """All of one class, of which one has room for what is not divided."""
    kinds = [block(trainable=1_000_000, kept=line(1e4), gradient=line(1e4), backward=line(1e5))]
    three = profile([Card("card", 3, GIB, steady(1e-3))], calls=("block",) * 4, kinds=kinds)
    found = with_tp_groups(in_a_row(three, message=line(1e4)), 2, faster=3.0)  # more than it costs
    plan = best(found, batch=12)
    (stage,) = plan.stages
    assert sorted(map(len, stage.tp_groups)) == [1, 2]
    assert {worker.device_class for worker in plan.workers} == {"card"}
    assert sorted((g.devices, g.tensor_parallel) for g in group_workers(plan, stage, 1)) == [
        (1, 1),
        (2, 2),
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan_table(plan))
    assert "2 in tensor-parallel groups of 2" in console.export_text()
    assert (
        get_prediction(plan).step_s
        < 0.9 * get_prediction(best(found, batch=12, tensor_parallel_size=1)).step_s
    )
    assert simulate(found, plan).step_s == pytest.approx(get_prediction(plan).step_s, rel=0.02)
    again = predict(found, plan)
    assert again.step_s == pytest.approx(get_prediction(plan).step_s, rel=1e-9)


def test_tp_groups_that_were_not_measured_are_refused():
    found, plan = planned()
    (stage,) = plan.stages
    four = tuple(w.model_copy(update={"samples": 1, "micro_batch": 1}) for w in stage.workers[1:])
    one = stage.workers[0].model_copy(update={"parts": 4})
    mixed = stage.model_copy(update={"workers": (one, *four), "tensor": 4})
    with raises(InputError, code="tensor-parallel-not-measured", what=4):
        predict(found, plan.model_copy(update={"stages": (mixed,), "ranks": ()}))


def test_memory_is_foretold_of_ranks_in_their_own_order():
    """Which need not be that of the stage."""
    found = cards(memory=GIB, faster=1.2)
    plan = best(found, tensor_parallel_size=1, zero_stages=3)
    (stage,) = plan.stages
    first, second, *others = stage.workers
    shares = (0.5, 0.1, *([0.4 / len(others)] * len(others)))
    workers = tuple(
        worker.model_copy(update={"state_share": share})
        for worker, share in zip(stage.workers, shares)
    )
    stage = stage.model_copy(update={"workers": workers})
    devices = (second.device, *(w.device for w in others), first.device)
    plan = plan.model_copy(update={"stages": (stage,), "ranks": devices, "prediction": None})
    held = {w.device: w.memory_bytes["state"] for w in predict(found, plan).workers}
    assert held[first.device] == pytest.approx(5 * held[second.device], rel=1e-3)


def test_of_many_mixtures_few_are_tried_and_the_bound_is_of_these(monkeypatch):
    found, plan = planned()
    monkeypatch.setattr(
        "gpumix.planner.pipeline_parallel.tensor_parallel_search.MIXTURES", ((float("inf"), 0),)
    )
    without = best(found)
    assert not without.stages[0].has_mixed_degrees
    monkeypatch.undo()
    # What was not looked at takes less, and the bound does not speak of it.
    told = get_prediction(without)
    assert get_prediction(plan).step_s < told.bound_s <= told.step_s
    monkeypatch.setattr(
        "gpumix.planner.pipeline_parallel.tensor_parallel_search.MAX_RANKED_MIXTURES", 1
    )
    fewer = get_prediction(best(found))
    assert fewer.bound_s <= fewer.step_s


def test_what_was_not_measured_of_tp_groups_is_no_assertion():
    found, plan = planned()
    (stage,) = plan.stages
    chunked = tuple(
        w.model_copy(update={"mode": w.mode.model_copy(update={"head": "chunked"})})
        for w in stage.workers
    )
    changed = plan.model_copy(update={"stages": (stage.model_copy(update={"workers": chunked}),)})
    classes = (
        c.model_copy(update={"chunked_cross_entropy": c.units[ROOT].backward})
        for c in found.classes
    )
    alone = found.model_copy(update={"classes": tuple(classes)})
    with raises(InputError, code="tensor-parallel-mode-not-measured", what=("small", 2)):
        predict(alone, changed)
