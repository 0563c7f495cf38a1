"""Devices compute units together where that is faster, or where alone they have no room."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpumix.cost.pipeline.staged_step import StagedStep
from gpumix.cost.predict import predict, predict_step_seconds
from gpumix.cost.tensor_parallel_groups import list_group_collectives
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.pipeline_parallel.candidate import UncutCandidate, build_staged_plan
from gpumix.planner.pipeline_parallel.stage_modes import StageMode, TensorParallelDegree
from gpumix.planner.plan import STRATEGIES
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import CollectiveTimes, Profile
from gpumix.simulate.events import simulate
from gpumix.train.console.tables import explain_plan
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

optimal, staged = STRATEGIES["optimal"], STRATEGIES["staged"]


def cards(
    *,
    memory: int = GIB,
    faster: float = 1.9,
    waits: float = 0.0,
    divided: float | None = None,
    kept: float = 1e4,
) -> Profile:
    """Four of one class on two hosts, and one of another."""
    found = profile(
        [
            Card("new", 4, memory, steady(1e-3), per_host=2),
            Card("old", 1, memory, steady(3e-3), per_host=1),
        ],
        calls=("block",) * 4,
        kinds=[block(trainable=1_000_000, kept=line(kept), gradient=line(1e4), backward=line(1e5))],
    )
    return with_tp_groups(
        in_a_row(found, message=line(1e4)), 2, faster=faster, waits=waits, divided=divided
    )


def request(batch: int, **space) -> PlanRequest:
    return PlanRequest(global_batch=batch, space=Space(**space))


def tp_groups(plan: Plan) -> list[tuple[str, ...]]:
    return [
        tuple(w.device for w in tp_group) for stage in plan.stages for tp_group in stage.tp_groups
    ]


def test_one_sample_is_computed_by_several():
    """A batch that cannot be divided over the devices."""
    found = cards()
    plan = optimal(found, request(1, max_pipeline_stages=1, leave_out=True))
    assert [stage.tensor for stage in plan.stages] == [2]
    alone = plan_fastest(found, request(1, tensor_parallel_size=1, max_pipeline_stages=1))
    assert get_prediction(plan).step_s < 0.6 * get_prediction(alone).step_s


def test_waiting_for_each_other_may_cost_more_than_it_gives():
    plan = optimal(cards(waits=10e-3), request(1, max_pipeline_stages=1, leave_out=True))
    assert not plan.uses_tensor_parallel


def test_a_tp_group_is_of_one_class_and_host():
    plan = optimal(cards(), request(8, tensor_parallel_size=2, leave_out=True))
    assert plan.uses_tensor_parallel
    for tp_group in tp_groups(plan):
        assert len(tp_group) == 2
    workers = {worker.device: worker for worker in plan.workers}
    for one, other in (tp_group for tp_group in tp_groups(plan)):
        assert workers[one].host == workers[other].host
        assert workers[one].device_class == workers[other].device_class == "new"
    assert all(a < b for a, b in pairwise(plan.ranks))


def test_where_a_model_has_no_room_tp_groups_may():
    """Kept whole it is too large for each, and divided over all of them too slow is no matter."""
    found = cards(memory=48 * MIB)
    space = {
        "zero_stages": 0,
        "max_pipeline_stages": 1,
        "gradient_checkpointing": True,
        "state_on": "device",
    }
    with pytest.raises(NoFeasiblePlanError):
        optimal(found, request(4, tensor_parallel_size=1, **space))
    plan = optimal(found, request(4, leave_out=True, **space))
    assert plan.uses_tensor_parallel
    for worker in get_prediction(plan).workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes


def test_stages_of_tp_groups():
    plan = staged(cards(), request(8, tensor_parallel_size=2, leave_out=True))
    assert len(plan.stages) > 1 and {stage.tensor for stage in plan.stages} == {2}
    assert get_prediction(plan).step_s == pytest.approx(predict_step_seconds(cards(), plan))


@pytest.mark.parametrize("most_stages", [1, 2])
def test_a_plan_in_tp_groups_is_predicted_as_a_whole_and_replayed(most_stages):
    found = cards(waits=1e-4)
    strategy = optimal if most_stages == 1 else staged
    plan = strategy(
        found, request(4, tensor_parallel_size=2, leave_out=True, max_pipeline_stages=most_stages)
    )
    expected = predict(found, plan)
    assert len(expected.workers) == len(plan.workers)
    assert expected.step_s == pytest.approx(get_prediction(plan).step_s)
    replayed = simulate(found, plan)
    assert replayed.step_s == pytest.approx(expected.step_s, rel=0.02)
    ranks = sorted(rank for lane in replayed.lanes for rank in lane.ranks)
    assert ranks == list(range(len(plan.workers)))


def test_all_devices_are_wanted_and_not_all_make_tp_groups():
    with raises(NoFeasiblePlanError, code="tensor-parallel-groups-impossible", what=2):
        optimal(cards(), request(8, tensor_parallel_size=2, leave_out=False))


def test_a_degree_that_was_not_measured_is_told():
    found = cards().model_copy(update={"tp_profiles": ()})
    with raises(InputError, code="tensor-parallel-not-measured", what=2):
        optimal(found, request(8, tensor_parallel_size=2, leave_out=True))


@pytest.mark.parametrize("strategy", [optimal, staged])
@pytest.mark.parametrize("degrees", [3, (4, 8)])
def test_tp_groups_for_which_no_host_has_devices_are_told(strategy, degrees):
    with raises(InputError, code="tensor-parallel-size-too-large", what="host") as caught:
        strategy(cards(), request(8, tensor_parallel_size=degrees, leave_out=True))
    assert "2 of class 'new', 1 of class 'old'" in caught.value.why
    assert "to 2 at most, or to 1" in caught.value.fix


def test_more_stages_than_there_are_tp_groups_are_refused():
    space = {"tensor_parallel_size": 2, "leave_out": True, "pipeline_schedules": "1f1b"}
    assert len(staged(cards(), request(8, min_pipeline_stages=2, **space)).stages) == 2
    with raises(InputError, code="pipeline-stages-too-many", what=(3, 2, 4)):
        staged(cards(), request(8, min_pipeline_stages=3, **space))


def test_naive_model_parallelism_has_one_device_a_stage():
    some = request(8).model_copy(update={"devices": ("new-0", "new-1", "new-2", "new-3")})
    plan = STRATEGIES["model"](cards(), some)
    assert len(plan.stages) == 4
    assert {(stage.tensor, len(stage.workers)) for stage in plan.stages} == {(1, 1)}


def test_the_sequence_is_divided_where_that_is_faster():
    space = {"tensor_parallel_size": 2, "max_pipeline_stages": 1, "leave_out": True}
    assert all(stage.sequence for stage in optimal(cards(divided=2.0), request(1, **space)).stages)
    for speed in (1.901, 1.8):  # a little faster is not worth it
        plan = optimal(cards(divided=speed), request(1, **space))
        assert plan.uses_tensor_parallel and not any(stage.sequence for stage in plan.stages)


@pytest.mark.extended
def test_the_sequence_is_divided_where_a_whole_one_has_no_room():
    found = cards(memory=48 * MIB, divided=1.0, kept=1.2e7)
    space = {
        "max_pipeline_stages": 1,
        "checkpoints_on": "device",
        "state_on": "device",
        "leave_out": True,
    }
    whole = request(1, sequence_parallel=False, **space)
    with pytest.raises(NoFeasiblePlanError):
        optimal(found, whole)
    plan = optimal(found, request(1, **space))
    assert all(stage.sequence for stage in plan.stages)
    for worker in get_prediction(plan).workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes


@pytest.mark.parametrize("wanted", [True, False])
def test_whether_the_sequence_is_divided_can_be_said(wanted):
    found = cards(divided=1.5 if wanted else 3.0)
    plan = optimal(
        found,
        request(
            1,
            tensor_parallel_size=2,
            sequence_parallel=wanted,
            max_pipeline_stages=1,
            leave_out=True,
        ),
    )
    assert {stage.sequence for stage in plan.stages} == {wanted}
    other = Space(sequence_parallel=not wanted)
    assert ("without" in other.missing(plan)) != wanted and other.missing(plan)


def test_a_divided_sequence_without_tp_groups_is_refused():
    with pytest.raises(ValueError, match="sequence_parallel"):
        Space(sequence_parallel=True, tensor_parallel_size=1)


def test_stages_that_divide_the_sequence_make_it_whole_at_their_ends():
    """And wait for that."""
    found = cards(waits=1e-4, divided=1.9)
    settings = {
        "tensor_parallel_size": 2,
        "leave_out": True,
        "max_pipeline_stages": 2,
        "pipeline_schedules": "1f1b",
    }
    plan = staged(found, request(8, sequence_parallel=True, **settings))
    assert len(plan.stages) == 2 and all(stage.sequence for stage in plan.stages)
    whole = plan.model_copy(
        update={"stages": tuple(s.model_copy(update={"sequence": False}) for s in plan.stages)}
    )
    assert predict(found, plan).step_s > predict(found, whole).step_s
    assert simulate(found, plan).step_s == pytest.approx(get_prediction(plan).step_s, rel=0.02)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_each_stage_waits_for_what_its_tp_groups_gather(cut):
    """A second entrance, and a place where hidden states are used whole: each gather is told once,
    and waited for once."""
    found = _with_gathers(cards(divided=1.9), enters=(0, 2), leaves=(1,), seconds=1.0)
    devices = [d for d in found.cluster.in_rank_order() if d.device_class == "new"]
    row = (tuple(devices[:2]), tuple(devices[2:]))
    way = UncutCandidate(row, (StageMode(TensorParallelDegree(2, True), Mode()),) * 2, "1f1b", 1)
    plan = build_staged_plan(found, 1, way, (cut, 4), ((1,), (1,)), strategy="staged")
    step = StagedStep(found, plan)
    for action in step.times.end_s:
        leader = plan.stages[action.stage].leaders[0]
        between = list_group_collectives(found, plan, action.stage, leader)[-1]
        gathers = {"forward": between.forward, "backward": between.backward}[action.kind]
        assert round(step.action_s(action)) == len(gathers)


def _with_gathers(
    found: Profile, *, enters: tuple[int, ...], leaves: tuple[int, ...], seconds: float
) -> Profile:
    """Each gather takes so long, all else next to nothing."""
    update = {"enters": enters, "leaves": leaves}
    tp_profiles = tuple(
        tp_profile.model_copy(update=update) if tp_profile.sequence else tp_profile
        for tp_profile in found.tp_profiles
    )
    gathers = CollectiveTimes(
        operation="tp_gather",
        form="2",
        group="inside",
        times=Curve(sizes=(1.0, 1e9), values=(seconds, seconds)),
    )
    return found.model_copy(
        update={"tp_profiles": tp_profiles, "network": (*found.network, gathers)}
    )


def test_the_plan_says_why():
    plan = make_plan(cards(), 1, space=Space(max_pipeline_stages=1, leave_out=True))
    assert plan.uses_tensor_parallel and plan.reasons is not None
    assert plan.reasons.alternatives


def test_devices_that_are_in_no_tp_group_are_told_so():
    """No cost is weighed of what cannot be: the one old card, and of three new ones the third."""
    found = cards()
    third = found.cluster.devices[0].model_copy(update={"id": "new-9", "ordinal": 9})
    cluster = found.cluster.model_copy(update={"devices": (*found.cluster.devices, third)})
    plan = make_plan(
        found.model_copy(update={"cluster": cluster}),
        8,
        space=Space(tensor_parallel_size=2, leave_out=True),
    )
    reasons = plan.reasons
    assert reasons is not None and reasons.mixing is None
    assert reasons.in_no_tp_group == ("new-9", "old-0")
    assert reasons.hosts_left_out == reasons.devices_left_out == ()
    assert (
        "2 GPUs (new-9, old-0) left out: too few of a type on a host for a tensor-parallel group"
        in explain_plan(plan)
    )


def test_devices_that_a_tp_group_is_faster_without_are_told_so():
    plan = make_plan(in_threes(), 1, space=Space(max_pipeline_stages=1, leave_out=True))
    assert [stage.tensor for stage in plan.stages] == [2] and plan.reasons is not None
    (left,) = plan.reasons.devices_left_out
    assert plan.reasons.in_no_tp_group == ()
    assert f"{left} left out: more GPUs would cost more time than they save" in explain_plan(plan)


def in_threes() -> Profile:
    """Three cards of one host, of which two may be a tensor-parallel group."""
    found = profile(
        [Card("new", 3, GIB, steady(1e-3), per_host=3)],
        calls=("block",) * 4,
        kinds=[block(kept=line(1e4), gradient=line(1e4), backward=line(1e5))],
    )
    return with_tp_groups(in_a_row(found, message=line(1e4)), 2, faster=1.9)
