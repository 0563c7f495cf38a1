"""At ZeRO stage 0 gradients are summed to all ranks: as long as an all-reduce was timed to take."""

from __future__ import annotations

import pytest

from gpumix.cost.predict import predict_step_seconds
from gpumix.planner.baselines.even import plan_even
from gpumix.planner.common.strategy import PlanRequest
from gpumix.schema.job.search_space import Space
from gpumix.schema.profile.profile import CollectiveTimes, Profile
from helpers.plans.profiles import FREE, GIB, Card, block, line, profile, steady
from helpers.plans.profiles import Network as Timed

TRAINABLE, CALLS = 1000, 4
REDUCE, GATHER, SUM = 1e-6, 3e-6, 2e-6  # seconds of a byte


def timed(*sums: CollectiveTimes) -> Profile:
    found = profile(
        [Card("a", 2, GIB, steady(0.0))],
        calls=("block",) * CALLS,
        kinds=[block(trainable=TRAINABLE, kept=FREE)],
        network=Timed(gather={"broadcast": line(GATHER)}, reduce={"all_to_all": line(REDUCE)}),
    )
    return found.model_copy(update={"network": (*found.network, *sums)})


def step_s(found: Profile, zero_stage: int) -> float:
    request = PlanRequest(
        global_batch=2, space=Space(zero_stages=zero_stage, gradient_checkpointing=True)
    )
    return predict_step_seconds(found, plan_even(found, request))


def test_a_sum_takes_what_was_timed():
    of_all = CollectiveTimes(operation="sum", form="native", times=line(SUM))
    bytes_of_all = 4 * TRAINABLE * CALLS
    assert step_s(timed(), 0) == pytest.approx((REDUCE + GATHER) * bytes_of_all)
    assert step_s(timed(of_all), 0) == pytest.approx(SUM * bytes_of_all)
    assert step_s(timed(of_all), 1) == pytest.approx(step_s(timed(), 1))


def test_a_sum_of_a_tp_group_is_none_of_all_ranks():
    of_group = CollectiveTimes(operation="sum", form="2", group="inside", times=line(SUM))
    assert step_s(timed(of_group), 0) == pytest.approx(step_s(timed(), 0))
