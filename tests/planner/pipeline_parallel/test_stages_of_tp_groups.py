"""Stages of tensor-parallel groups: of the wanted degrees, in micro-batches that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.schema.cluster.network import Link, Network
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.profile.profile import Profile
from gpumix.simulate.events import simulate
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.every_stage import least_s
from helpers.plans.profiles import GIB, Card, block, in_a_row, line, profile, steady, with_tp_groups


def request(batch: int, **space) -> PlanRequest:
    return PlanRequest(global_batch=batch, space=Space(**space))


def in_hosts(
    per_host: int, degree: int, *, faster: float, start: float = 0.0, count: int = 8
) -> Profile:
    """Cards of one class over links of no time, and tensor-parallel groups of so many."""
    found = profile(
        [Card("new", count, GIB, steady(1e-3, start=start), per_host=per_host)],
        calls=("block",) * 4,
        kinds=[block(kept=line(1e4), gradient=line(1e4), backward=line(1e5))],
        links=Network(inside=Link.stated(1e12, 1e-6), between=Link.stated(1e12, 1e-6)),
    )
    return with_tp_groups(in_a_row(found, message=line(1e3)), degree, faster=faster)


def test_as_many_stages_as_are_wanted_where_tp_groups_would_have_one():
    found = in_hosts(4, 4, faster=3.9)
    assert len(plan_fastest(found, request(1, min_pipeline_stages=2)).stages) >= 2


@examples(4)
@given(
    old=st.integers(0, 1),
    batch=st.integers(1, 2),
    faster=st.sampled_from([1.2, 1.9]),
    waits=st.sampled_from([0.0, 1e-3]),
    link=st.sampled_from([1e6, 1e12]),
    degrees=st.sampled_from([(1, 2), (2,)]),
    zero_stage=st.integers(0, 3),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_no_plan_of_stages_of_which_some_are_tp_groups_is_faster(
    old, batch, faster, waits, link, degrees, zero_stage, schedule
):
    """Two hosts of two devices, or of two and one: all rows of groups, tensor-parallel or not,
    all cuts, all ways to deal micro-batches to tensor-parallel groups and devices."""
    new = Card("new", 2 if old else 4, GIB, steady(1e-3), per_host=2)
    found = profile(
        [new, Card("old", 1, GIB, steady(2e-3), per_host=1)] if old else [new],
        calls=("block",) * 3,
        kinds=[block(kept=line(1e4), gradient=line(1e4), backward=line(1e5))],
        links=Network(inside=Link.stated(1e12, 1e-6), between=Link.stated(link, 1e-6)),
    )
    found = with_tp_groups(in_a_row(found, message=line(1e4)), 2, faster=faster, waits=waits)
    if old and degrees == (2,):
        degrees = (1, 2)  # one device is no tensor-parallel group
    space = Space(
        tensor_parallel_size=degrees, zero_stages=zero_stage, pipeline_schedules=schedule,
        gradient_checkpointing=True, cross_entropy="whole", sequence_parallel=False,
        orders="layered", checkpoints_on="device",
    )  # fmt: skip
    plan = plan_staged(found, PlanRequest(global_batch=batch, space=space))
    assert get_prediction(plan).step_s == pytest.approx(least_s(found, batch, space), rel=1e-6)
    assert get_prediction(plan).bound_s <= get_prediction(plan).step_s * (1 + 1e-9)


def with_limit(found: Profile, largest: int) -> Profile:
    """Where tensor-parallel groups ran no larger micro-batches."""
    limits = {"largest_micro_batch": largest}
    tp_profiles = tuple(
        tp_profile.model_copy(
            update={"classes": tuple(c.model_copy(update=limits) for c in tp_profile.classes)}
        )
        for tp_profile in found.tp_profiles
    )
    return found.model_copy(update={"tp_profiles": tuple(tp_profiles)})


def test_tp_groups_run_no_larger_micro_batches_than_were_measured():
    found = in_hosts(2, 2, faster=1.9, start=2e-2, count=4)
    wanted = request(2, tensor_parallel_size=(1, 2), pipeline_schedules="1f1b")
    plan = plan_staged(found, wanted)
    assert plan.uses_tensor_parallel and max(worker.micro_batch for worker in plan.workers) == 2
    plan = plan_staged(with_limit(found, 1), wanted)
    assert plan.uses_tensor_parallel and max(worker.micro_batch for worker in plan.workers) == 1


def test_tp_groups_may_run_larger_micro_batches_than_their_members_alone():
    found = in_hosts(2, 2, faster=1.9, start=5e-3)
    alone = tuple(c.model_copy(update={"largest_micro_batch": 1}) for c in found.classes)
    found = found.model_copy(update={"classes": alone})
    plan = plan_staged(found, request(8, tensor_parallel_size=(1, 2), pipeline_schedules="1f1b"))
    assert max(worker.micro_batch for worker in plan.workers) > 1


def test_stages_may_have_tp_groups_of_different_degrees_where_none_computes_alone():
    """A host of four is one tensor-parallel group, one of two another."""
    found = profile(
        [
            Card("four", 4, GIB, steady(4e-3), per_host=4),
            Card("two", 2, GIB, steady(2e-3), per_host=2),
        ],
        calls=("block",) * 4,
        kinds=[block(kept=line(1e4), gradient=line(1e4), backward=line(1e5))],
        links=Network(inside=Link.stated(1e12, 1e-6), between=Link.stated(1e9, 1e-6)),
    )
    found = in_a_row(found, message=line(1e3))
    both = [with_tp_groups(found, 4, faster=3.9), with_tp_groups(found, 2, faster=1.95)]
    tp_profiles = tuple(of_degree for one in both for of_degree in one.tp_profiles)
    network = tuple(times for one in both for times in one.network)
    found = found.model_copy(update={"tp_profiles": tp_profiles, "network": network})
    plan = plan_staged(found, request(1, tensor_parallel_size=(2, 4), pipeline_schedules="1f1b"))
    assert {s.workers[0].device_class: s.tensor for s in plan.stages} == {"four": 4, "two": 2}


@pytest.mark.extended
@pytest.mark.slow
def test_in_one_stage_two_form_a_group_next_to_others_that_compute_alone():
    """Three on each host: of the older ones two are too slow alone for what the stage has to do."""
    found = profile(
        [
            Card("new", 3, GIB, steady(1e-3), per_host=3),
            Card("old", 3, GIB, steady(2e-3), per_host=3),
        ],
        calls=("block",) * 8,
        kinds=[block(trainable=1_000_000, kept=line(1e6), gradient=line(1e6), backward=line(4e6))],
        links=Network(inside=Link.stated(1e12, 1e-6), between=Link.stated(1e9, 1e-6)),
    )
    found = with_tp_groups(in_a_row(found, message=line(1e4)), 2, faster=1.5, divided=1.9)
    space = {
        "pipeline_schedules": "1f1b",
        "sequence_parallel": False,
        "checkpoints_on": "device",
        "cross_entropy": "whole",
    }
    plan = plan_staged(found, request(2, tensor_parallel_size=(1, 2), **space))
    assert len(plan.stages) > 1 and any(stage.has_mixed_degrees for stage in plan.stages)
    alone = plan_staged(found, request(2, tensor_parallel_size=1, **space))
    assert get_prediction(plan).step_s < 0.95 * get_prediction(alone).step_s
    again = predict(found, plan)
    assert again.step_s == pytest.approx(get_prediction(plan).step_s, rel=1e-9)
    assert simulate(found, plan).step_s == pytest.approx(again.step_s, rel=1e-9)
    assert get_prediction(plan).bound_s <= again.step_s
    for worker in again.workers:
        assert worker.peak_bytes <= worker.memory_limit_bytes


def test_devices_that_are_too_many_for_tp_groups_are_left_out():
    found = in_hosts(3, 2, faster=1.9)
    plan = plan_staged(
        found, request(4, tensor_parallel_size=2, leave_out=True, pipeline_schedules="1f1b")
    )
    assert len(plan.workers) == 6 and {stage.tensor for stage in plan.stages} == {2}
    with raises(NoFeasiblePlanError, code="tensor-parallel-groups-impossible", what=2):
        plan_staged(found, request(4, tensor_parallel_size=2, leave_out=False))


def test_one_tp_group_alone_has_one_stage():
    """Of three devices two are a tensor-parallel group, and the third is none."""
    found = in_hosts(3, 2, faster=1.9, count=3)
    with raises(InputError, code="pipeline-of-one-group", what=2) as caught:
        plan_staged(found, request(4, tensor_parallel_size=2, leave_out=True))
    assert "tensor_parallel_size: [1, 2]" in caught.value.fix
    assert len(plan_fastest(found, request(4, tensor_parallel_size=2, leave_out=True)).stages) == 1
