"""Plans that cut no batch: one device computes it, all store."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.peak_memory import compute_usable_bytes
from gpumix.planner.common.strategy import DevicePart, PlanRequest, build_plan
from gpumix.planner.data_parallel.branch_and_bound import find_fill_level as fill
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.undivided import plan_undivided, select_strategy
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from helpers.draws import examples
from helpers.errors import raises
from helpers.extended import left_out
from helpers.plans.brute import small_profiles
from helpers.plans.naive import peak_bytes, step_seconds
from helpers.plans.policies import plan_by, ways
from helpers.plans.profiles import fleet

MANY = examples(6)
ONE = EVERYTHING.in_one_stage()
SPACES = [
    EVERYTHING,
    Space(zero_stages=3, gradient_checkpointing=True, state_on="device"),
    Space(zero_stages=0),
]


def fits(profile, plan) -> bool:
    """By memory that is counted by hand, the framework's with it."""
    return all(
        peak_bytes(profile, plan, rank)[0]
        <= compute_usable_bytes(profile.cluster.class_named(worker.device_class))
        for rank, worker in enumerate(plan.workers)
    )


@pytest.mark.parametrize(
    "space", left_out(SPACES, SPACES[1:2]), ids=["everything", "layers", "nothing is divided"]
)
@MANY
@given(profile=small_profiles(), batch=st.integers(1, 12))
def test_one_device_computes_and_no_plan_of_equal_shares_is_faster(space, profile, batch):
    plan = plan_by(plan_undivided, profile, batch, space)
    if plan is not None:
        assert plan.is_uncut
        assert sorted(worker.samples for worker in plan.workers)[:-1] == [0] * (
            len(plan.workers) - 1
        )
        assert sum(worker.state_share for worker in plan.workers) == pytest.approx(1.0)
        assert fits(profile, plan)
        assert plan.prediction.step_s == pytest.approx(step_seconds(profile, plan), rel=1e-6)
    for setting, mode in ways(profile, batch, space):
        for computes in setting.devices:
            if setting.largest_micro_batch(computes.device_class, batch) < batch:
                continue
            parts = {
                device.id: DevicePart(
                    n := batch * (device == computes), n, 1 / len(setting.devices), mode
                )
                for device in setting.devices
            }
            other = build_plan(setting, strategy="even", global_batch=batch, parts=parts)
            if fits(profile, other):
                assert plan is not None
                assert plan.prediction.step_s <= other.prediction.step_s * (1 + 1e-9)


@MANY
@given(profile=small_profiles(), batch=st.integers(1, 12))
def test_it_is_never_faster_than_the_fastest(profile, batch):
    plan = plan_by(plan_undivided, profile, batch, ONE)
    if plan is not None:
        best = plan_fastest(profile, PlanRequest(global_batch=batch, space=ONE))
        assert best.prediction.step_s <= plan.prediction.step_s * (1 + 1e-9)


def test_many_unlike_devices_store_what_one_computes_with():
    found = fleet(64)
    plan = plan_undivided(found, PlanRequest(global_batch=8))
    (busy,) = [worker for worker in plan.workers if worker.samples]
    assert (busy.device_class, busy.samples, busy.micro_batch) == ("a100", 8, 8)
    with raises(NoFeasiblePlanError, code="undivided-batch-does-not-fit", what=4096):
        plan_undivided(found, PlanRequest(global_batch=4096))


@pytest.mark.parametrize(
    ("most", "counts", "level"),
    [
        ((1.0, 1.0), (1, 3), 0.25),
        ((0.1, 1.0), (1, 3), 0.3),
        ((1.0, 0.2), (1, 3), 0.4),
        ((0.0, 0.5), (1, 2), 0.5),
        ((1.0,), (1,), 1.0),
    ],
)
def test_the_state_is_spread_as_evenly_as_there_is_room(most, counts, level):
    found = fill(np.asarray(most), np.ones(len(most)), np.asarray(counts, float))
    assert found == pytest.approx(level)
    assert sum(min(m, level) * c for m, c in zip(most, counts)) == pytest.approx(1.0)


def test_it_is_what_couples_asks_for():
    assert select_strategy("batch") == "undivided"
    assert select_strategy("micro-batch") == select_strategy("") == "optimal"
