"""`optimal` takes several stages where they pay, and one where they do not."""

from __future__ import annotations

import pytest

from gpumix.cost.predict import predict
from gpumix.planner.baselines.best_subset import plan_best_subset
from gpumix.planner.baselines.naive_model_parallel import plan_naive_model_parallel
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.compare import compare
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import UncutCandidate
from gpumix.planner.pipeline_parallel.micro_batch_counts import CandidateEvaluator, CutCandidate
from gpumix.planner.pipeline_parallel.stage_modes import NO_TENSOR_PARALLEL, StageMode
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.cluster.network import Link
from gpumix.schema.cluster.network import Network as StatedNetwork
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile
from helpers.errors import raises
from helpers.plans.profiles import GIB, MIB, Card, Network, block, in_a_row, line, profile, steady


def hosts(link: float, *, memory: int = GIB, trainable: int = 1_000_000) -> Profile:
    """Two hosts of two cards each, of another class on each."""
    found = profile(
        [
            Card("new", 2, memory, steady(1e-3), per_host=2),
            Card("old", 2, memory, steady(3e-3), per_host=2),
        ],
        calls=("block",) * 8,
        kinds=[
            block(
                trainable=trainable,
                kept=line(1e4),
                gradient=line(1e4),
                forward=line(1e4),
                backward=line(1e5),
            )
        ],
        links=StatedNetwork(inside=Link.stated(10e9, 1e-5), between=Link.stated(link, 1e-5)),
    )
    return in_a_row(found, message=line(1e4))


def test_over_a_slow_link_stages_are_faster():
    """And the plan says what it was weighed against."""
    found, request = hosts(10e6), PlanRequest(global_batch=32)
    plan = make_plan(found, 32)
    assert len(plan.stages) > 1
    assert (
        get_prediction(plan).step_s < 0.99 * get_prediction(plan_one_stage(found, request)).step_s
    )
    assert plan.strategy == "optimal"
    assert plan.reasons is not None
    assert {a.strategy for a in plan.reasons.alternatives} >= {"even"}
    assert plan.reasons.worth == ()


@pytest.mark.extended
def test_a_stage_keeps_to_one_host_where_links_between_are_slow():
    plan = plan_staged(hosts(1e6), PlanRequest(global_batch=32))
    for stage in plan.stages:
        assert len({w.host for w in stage.workers}) == 1


def test_over_a_fast_link_one_stage_is_faster():
    plan = plan_fastest(hosts(1e12), PlanRequest(global_batch=32))
    assert len(plan.stages) == 1


def test_where_links_were_measured_a_slow_class_is_left_out():
    """They are known of all devices: over them one class alone is no slower than over its own."""
    cards = [
        Card("new", 2, GIB, steady(1e-3)),
        Card("old", 1, GIB, steady(9e-3), optimizer_s_per_element=1e-7),
    ]
    every = line(1e-9)
    slow = Network(gather={"broadcast": every}, reduce={"all_to_all": every})
    found = profile(cards, kinds=[block(trainable=1_000_000)], network=slow)
    request = PlanRequest(global_batch=8, space=Space(zero_stages=0, leave_out=True))
    plan, alone = plan_fastest(found, request), plan_best_subset(found, request)
    assert {worker.device_class for worker in plan.workers} == {"new"}
    assert plan.strategy == "optimal"
    mixed = plan_one_stage(found, request)
    assert (
        get_prediction(plan).step_s <= get_prediction(alone).step_s < get_prediction(mixed).step_s
    )


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("link", [10e6, 1e12])
def test_a_plan_and_a_comparison_agree(link):
    found = hosts(link)
    rows = {row.strategy: row for row in compare(found, PlanRequest(global_batch=32)).rows}
    plan, row = make_plan(found, 32), rows["optimal"]
    assert (row.step_s, row.zero_stage) == (get_prediction(plan).step_s, plan.zero_stage)


def test_who_wants_one_stage_gets_one():
    request = PlanRequest(global_batch=32, space=Space(max_pipeline_stages=1))
    assert len(plan_fastest(hosts(1e5), request).stages) == 1


def test_naive_model_parallelism_fills_devices_alike():
    found = profile(
        [Card("big", 1, 300 * MIB, steady(1e-3)), Card("small", 1, 100 * MIB, steady(1e-3))],
        calls=("block",) * 8,
        kinds=[block(trainable=2_000_000, kept=line(1e4), backward=line(1e5))],
    )
    plan = plan_naive_model_parallel(in_a_row(found), PlanRequest(global_batch=4))
    assert [len(stage.units) for stage in plan.stages] == [6, 2]
    assert plan.zero_stage == 0
    assert [w.samples for w in plan.workers] == [4, 4]
    assert [w.micro_batch for w in plan.workers] == [4, 4]


def test_a_model_that_fits_nowhere_is_told():
    with raises(NoFeasiblePlanError, code="policy-does-not-fit", what="layer by layer"):
        plan_naive_model_parallel(hosts(1e9, memory=MIB), PlanRequest(global_batch=4))


def test_the_batch_is_one_micro_batch_where_it_finds_room():
    """Whatever was measured: a larger one may not have been faster."""
    for memory, size in ((400 * MIB, 8), (100 * MIB, 4)):
        found = profile(
            [Card("one", 2, memory, steady(1e-3), largest=2)],
            calls=("block",) * 4,
            kinds=[block(trainable=1000, kept=line(1e3), backward=line(16 * MIB))],
        )
        plan = plan_naive_model_parallel(in_a_row(found), PlanRequest(global_batch=8))
        assert {w.micro_batch for w in plan.workers} == {size}
        assert all(w.peak_bytes <= w.memory_limit_bytes for w in get_prediction(plan).workers)


MORE_DEVICES = [Card("small", 2, 100 * MIB, steady(1e-4)), Card("big", 2, GIB, steady(1e-3))]


def test_of_more_devices_than_units_those_with_most_memory_are_taken():
    found = in_a_row(profile(MORE_DEVICES, calls=("block",) * 3))
    plan = plan_naive_model_parallel(
        found, PlanRequest(global_batch=4, space=Space(leave_out=True))
    )
    assert {w.device for w in plan.workers} == {"small-0", "big-0", "big-1"}


def test_more_devices_than_units_are_told_where_none_may_be_left_out():
    found = in_a_row(profile(MORE_DEVICES, calls=("block",) * 3))
    request = PlanRequest(global_batch=4, space=Space(leave_out=False))
    with raises(InputError, code="too-few-units", what=4):
        plan_naive_model_parallel(found, request)


@pytest.mark.extended
@pytest.mark.parametrize("link", [2e8, 5e8])
def test_no_plan_is_faster_than_the_bound(link):
    """Whether it has one stage or several, and whichever was taken."""
    found, request = hosts(link), PlanRequest(global_batch=32)
    plan, stages = plan_fastest(found, request), plan_staged(found, request)
    assert get_prediction(plan).bound_s <= get_prediction(stages).step_s


def test_state_that_is_moved_to_where_there_is_room_is_updated_there():
    """And the step takes as long as that."""
    found = profile(
        [
            Card("big", 2, 200 * MIB, steady(1e-3), per_host=4, optimizer_s_per_element=1e-8),
            Card("small", 1, 24 * MIB, steady(1e-3), per_host=4, optimizer_s_per_element=1e-8),
        ],
        calls=("block",) * 2,
        kinds=[block(trainable=2_000_000, kept=line(1e4), gradient=line(1e4), backward=line(1e5))],
        links=StatedNetwork(inside=Link.stated(10e9, 1e-5), between=Link.stated(1e9, 1e-5)),
    )
    found = in_a_row(found, message=line(1e4))
    row = (found.cluster.in_rank_order()[:1], found.cluster.in_rank_order()[1:])
    way = UncutCandidate(row, (StageMode(NO_TENSOR_PARALLEL, Mode()),) * 2, "1f1b", 1)
    counting = CandidateEvaluator(CallTimesCache(found), 8)
    counted = counting.best(CutCandidate(way, 3, (1, 2)), float("inf"))
    assert counted is not None
    shares = [worker.state_share for worker in counted.plan.stages[1].workers]
    assert shares[0] > 0.51 and predict(found, counted.plan).step_s == counted.seconds
    assert counting.best(CutCandidate(way, 3, (1, 2)), counted.seconds) is None
