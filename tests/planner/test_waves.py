"""Batches that fit at no plan of one wave are planned in several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import PlanRequest, is_within_memory
from gpumix.planner.optimal import plan_fastest
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.draws import examples
from helpers.plans.brute import small_profiles
from helpers.plans.profiles import fleet

ON_DEVICES = {"checkpoints_on": "device", "state_on": "device", "max_pipeline_stages": 1}


def planned(profile: Profile, batch: int, **space) -> Plan | None:
    request = PlanRequest(global_batch=batch, space=Space(**ON_DEVICES | space))
    try:
        return plan_fastest(profile, request)
    except NoFeasiblePlanError:
        return None


@examples(10)
@given(small_profiles(), st.integers(1, 32))
def test_more_waves_only_where_they_are_faster(profile, batch):
    single = planned(profile, batch, waves=False)
    found = planned(profile, batch)
    if single is not None and found.waves == 1:
        assert found == single
    elif single is not None:
        assert found.prediction.step_s < single.prediction.step_s
        assert found.prediction.bound_s <= found.prediction.step_s


@pytest.mark.parametrize(
    ("memory_factor", "batch"), [(0.5, 256), (0.5, 1001), (0.52, 640), (0.6, 4096)]
)
def test_several_waves_where_one_does_not_fit(memory_factor, batch):
    profile = fleet(4, memory_factor=memory_factor)
    assert planned(profile, batch, waves=False) is None
    plan = planned(profile, batch)
    assert plan.waves > 1
    assert sum(worker.samples for worker in plan.workers) == plan.global_batch == batch
    assert is_within_memory(plan.prediction.workers)
    assert plan.prediction.bound_s <= plan.prediction.step_s
    same = Plan.model_validate(plan.model_dump())
    assert predict(profile, same).step_s == pytest.approx(plan.prediction.step_s, rel=1e-9)


def test_waves_may_be_left_out():
    for space in ({"zero_stages": (0, 1)}, {"orders": "sequential"}, {"waves": False}):
        assert Space(**space).of_one_wave() is None
    assert Space(min_pipeline_stages=2).of_one_wave() is None
    assert planned(fleet(4, memory_factor=0.5), 256, zero_stages=(0, 1)) is None
