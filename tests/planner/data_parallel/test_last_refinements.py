"""The last touches on a plan: fewer collectives, and graphs kept in what memory is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.predict import predict
from gpumix.planner.common.sharding_setting import make_setting
from gpumix.planner.common.strategy import DevicePart, PlanRequest, build_plan
from gpumix.planner.data_parallel.class_options import TimeBounds
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.refine import _most_graphs, refine_plan
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.profile.profile import ROOT, UnitTimes
from helpers.draws import examples
from helpers.plans.brute import small_profiles
from helpers.plans.profiles import GIB, Card, Network, block, curve, line, profile, root

MANY = examples(6)
TIMES = {
    "block": UnitTimes(forward=line(1.0), backward=line(3.0), gradient=line(2.0)),
    ROOT: UnitTimes(forward=line(0.1), backward=line(0.2)),
}


def touched(measured, batch, space=EVERYTHING):
    """The optimal plan before and after."""
    request, paces = PlanRequest(global_batch=batch, space=space), TimeBounds(measured, batch)
    plan = plan_one_stage(measured, request, paces)
    return plan, refine_plan(measured, request, plan, paces)


@MANY
@given(small_profiles(), st.integers(1, 12))
def test_a_finished_plan_fits_and_is_hardly_longer(profile, batch):
    try:
        before, after = touched(profile, batch)
    except NoFeasiblePlanError:
        return
    found = predict(profile, after)
    assert found.step_s == pytest.approx(after.prediction.step_s)
    assert found.step_s <= before.prediction.step_s * 1.001 * (1 + 1e-9)
    assert after.prediction.bound_s <= found.step_s
    assert all(w.peak_bytes <= w.memory_limit_bytes for w in found.workers)
    assert sum(w.samples for w in after.workers) == batch
    assert after.zero_stage <= before.zero_stage


def test_of_plans_that_are_as_fast_the_lowest_stage_wins():
    measured = profile([Card("c", 2, GIB, TIMES)], calls=("block",) * 3, root_unit=root(100))
    assert touched(measured, 4)[1].zero_stage == 0


@pytest.mark.parametrize(("room", "kept"), [(500, 0), (1000, 2), (2100, 3), (5999, 6), (7000, 8)])
def test_as_many_graphs_are_kept_as_fit(room, kept):
    """Of 8 pairs of 4 calls and 2 micro-batches, 1000 bytes each. A backward needs 1000 bytes, and
    nothing from a kept graph: so the second graph of a call takes no more than the first.
    """
    kinds = [block(trainable=0, saved=line(1000), backward=line(1000))]
    measured = profile([Card("c", 1, GIB, TIMES)], calls=("block",) * 4, kinds=kinds)
    setting = make_setting(measured, measured.cluster.in_rank_order())
    parts = {measured.cluster.devices[0].id: DevicePart(2, 1, 1.0)}
    plan = build_plan(setting, strategy="by hand", global_batch=2, parts=parts)
    assert _most_graphs(measured, plan, plan.workers[0], room) == kept


def test_units_are_joined_where_each_collective_takes_long_by_itself():
    slow = curve(10.0, 10.1, sizes=(1, 2**20))
    network = Network(gather={"broadcast": slow}, reduce={"all_to_all": slow})
    measured = profile([Card("c", 2, GIB, TIMES)], calls=("block",) * 8, network=network)
    before, after = touched(measured, 2, Space(zero_stages=(3,)))
    assert after.stages[0].joined == 8
    assert after.prediction.step_s < 0.5 * before.prediction.step_s


IN_CHUNKS = Space(
    zero_stages=(3,),
    gradient_checkpointing=(True,),
    orders=("layered",),
    checkpoints_on=("device",),
)


@pytest.mark.parametrize(
    ("chunked_s", "memory", "head"),
    [
        (0.2, GIB, "chunked"),  # as fast, and smaller
        (0.4, GIB, "whole"),  # slower, and there is room
        (0.4, 90_000, "chunked"),  # slower, but whole logits find no room
        (None, GIB, "whole"),  # the class cannot
    ],
)
def test_the_head_runs_in_chunks_where_that_is_no_slower_or_saves_the_plan(chunked_s, memory, head):
    in_chunks = None if chunked_s is None else line(chunked_s)
    measured = profile(
        [Card("c", 1, memory, TIMES, chunked_cross_entropy=in_chunks)],
        calls=("block",) * 2,
        root_unit=root(100, head=line(50_000), chunked_cross_entropy=line(1_000)),
    )
    plan, after = touched(measured, 2, IN_CHUNKS)
    assert {w.mode.head for w in (*plan.workers, *after.workers)} == {head}


def cards_with_hosts(memory, **more):
    of_host = {"host_copy": line(1e-9), "host_optimizer_s_per_element": 1e-6}
    card = Card("c", 2, memory, TIMES, optimizer_s_per_element=1e-9, **(of_host | more))
    return profile([card], calls=("block",) * 2, kinds=[block(trainable=2000)], root_unit=root(100))


@pytest.mark.parametrize(
    ("memory", "more", "state_on"),
    [
        (GIB, {}, "device"),
        (50_000, {}, "host"),  # 2 x 16 bytes an element, and what is gathered
        (50_000, {"host_optimizer_s_per_element": None}, None),
        (50_000, {"host_bytes": 10_000}, None),
        (50_000, {"host_bytes": 40_000}, "host"),
    ],
)
def test_state_goes_to_the_host_where_devices_have_no_room(memory, more, state_on):
    measured = cards_with_hosts(memory, **more)
    if state_on is None:
        with pytest.raises(NoFeasiblePlanError):
            touched(measured, 4)
        return
    plan, after = touched(measured, 4)
    assert {w.state_on for w in (*plan.workers, *after.workers)} == {state_on}


def test_a_pinned_place_is_kept():
    plan, after = touched(cards_with_hosts(GIB), 4, Space(state_on="host"))
    assert {w.state_on for w in (*plan.workers, *after.workers)} == {"host"}
    assert all(w.host_bytes >= 16 * 2000 for w in after.prediction.workers)
