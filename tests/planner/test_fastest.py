"""`optimal` takes several stages where they pay, and one where they do not."""

from __future__ import annotations

import pytest
from profiles import GIB, MIB, Card, block, in_a_row, line, profile, steady

from gpumix.planner.base import PlanRequest, predicted
from gpumix.planner.by_memory import by_memory
from gpumix.planner.explain import plan as make_plan
from gpumix.planner.fastest import fastest
from gpumix.planner.optimal import optimal
from gpumix.planner.staged import staged
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.network import Link
from gpumix.spec.network import Network as StatedNetwork
from gpumix.spec.profile import Profile
from gpumix.spec.space import Space


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
    found, request = hosts(10e6), PlanRequest(global_batch=32)
    plan = fastest(found, request)
    assert len(plan.stages) > 1
    assert predicted(plan).step_s < 0.99 * predicted(optimal(found, request)).step_s
    assert plan.strategy == "optimal"


def test_a_stage_keeps_to_one_host_where_links_between_are_slow():
    plan = staged(hosts(1e6), PlanRequest(global_batch=32))
    for stage in plan.stages:
        assert len({w.host for w in stage.workers}) == 1


def test_over_a_fast_link_one_stage_is_faster():
    plan = fastest(hosts(1e12), PlanRequest(global_batch=32))
    assert len(plan.stages) == 1


def test_who_wants_one_stage_gets_one():
    request = PlanRequest(global_batch=32, space=Space(most_stages=1))
    assert len(fastest(hosts(1e5), request).stages) == 1


def test_naive_model_parallelism_fills_devices_alike():
    found = profile(
        [Card("big", 1, 300 * MIB, steady(1e-3)), Card("small", 1, 100 * MIB, steady(1e-3))],
        calls=("block",) * 8,
        kinds=[block(trainable=2_000_000, kept=line(1e4), backward=line(1e5))],
    )
    plan = by_memory(in_a_row(found), PlanRequest(global_batch=4))
    assert [len(stage.units) for stage in plan.stages] == [6, 2]
    assert plan.zero_stage == 0
    assert [w.samples for w in plan.workers] == [4, 4]
    assert [w.micro_batch for w in plan.workers] == [4, 4]


def test_a_model_that_fits_nowhere_is_told():
    with pytest.raises(NoFeasiblePlanError, match="layer by layer"):
        by_memory(hosts(1e9, memory=MIB), PlanRequest(global_batch=4))


def test_the_plan_says_why():
    plan = make_plan(hosts(10e6), 32)
    assert len(plan.stages) > 1 and plan.reasons is not None
    assert {a.strategy for a in plan.reasons.alternatives} >= {"even"}
    assert plan.reasons.worth == ()


def test_more_devices_than_units_are_told():
    found = profile([Card("one", 3, GIB, steady(1e-3))], calls=("block",) * 2)
    with pytest.raises(InputError, match="3 devices of a stage each need as many units"):
        by_memory(in_a_row(found), PlanRequest(global_batch=4))
