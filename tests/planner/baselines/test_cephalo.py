"""Cephalo's policy against its recurrence in plain loops."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpumix.planner.baselines import cephalo as module
from gpumix.planner.baselines.cephalo import plan_at_factor, plan_cephalo
from gpumix.planner.common.policy_shortage import Shortage, make_policy_error
from gpumix.planner.common.score import iterate_even_settings
from gpumix.planner.common.sharding_setting import make_setting
from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.stage import Mode
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import small_profiles
from helpers.plans.policies import parts_of, plan_by, room, seconds
from helpers.plans.profiles import GIB, MIB, Card, block, fleet, line, profile, steady

MANY = examples(8)
INF = float("inf")


@MANY
@given(small_profiles(), st.integers(1, 8))
def test_it_is_the_published_recurrence(profile, batch):
    assume(batch >= len(profile.cluster.devices))
    plan = plan_by(plan_cephalo, profile, batch, Space(checkpoints_on=("device",)))
    expected = recurrence(profile, batch)
    assert (None if plan is None else sorted(parts_of(plan))) == expected


def recurrence(profile, batch):
    """(class, samples, micro-batch) of each device, by the recurrence in plain loops."""
    devices = list_devices_by_rank(profile, PlanRequest(global_batch=batch))
    names = sorted(d.device_class for d in devices)
    equal, unequal = (make_setting(profile, devices, cap=cap) for cap in (1.0, INF))
    mode, share = Mode(), 1 / len(names)

    @cache
    def cost(name, m, n):  # seconds, whether it fits an equal share, room for any share
        evenly = room(equal, name, mode, m * n, m) >= share
        left = room(unequal, name, mode, m * n, m)
        links = equal.links if evenly else unequal.links
        took = seconds(equal, name, mode, m * n, m, links) if evenly or left >= 0 else INF
        return took, evenly, left

    best = {(0, 0, 0): (0.0, None)}
    for i, name in enumerate(names, 1):
        for j, s in product(range(1, batch + 1), repeat=2):
            for m in range(1, equal.largest_micro_batch(name, s) + 1):
                for n in range(1, j // m + 1):
                    before = best.get((i - 1, j - n * m, s - m), (INF, None))[0]
                    time = max(before, cost(name, m, n)[0])
                    if time < best.get((i, j, s), (INF, None))[0]:
                        best[i, j, s] = (time, (m, n))
    found = []
    for s in range(1, batch + 1):
        if (len(names), batch, s) not in best:
            continue
        time, chosen = best[len(names), batch, s][0], []
        j, left = batch, s
        for i in range(len(names), 0, -1):
            m, n = best[i, j, left][1]
            chosen.append((names[i - 1], m, n))
            j, left = j - m * n, left - m
        costs = [cost(*one) for one in chosen]
        rooms = [r for _, _, r in costs]
        if all(e for _, e, _ in costs) or (min(rooms) >= 0 and sum(rooms) >= 1 - 1e-12):
            found.append((time, s, sorted((name, m * n, m) for name, m, n in chosen)))
    return min(found)[2] if found else None


def test_shares_are_as_even_as_room_allows():
    kinds = [block(trainable=300_000, backward=line(1e5))]
    cards = [
        Card("big", 2, 60 * MIB, steady(1.0), framework=MIB),
        Card("small", 1, 12 * MIB, steady(1.0), framework=MIB),
    ]
    plan = plan_cephalo(profile(cards, kinds=kinds), PlanRequest(global_batch=3))
    shares = {w.device_class: w.state_share for w in plan.workers}
    assert shares["small"] < 1 / 3 < shares["big"]
    assert 2 * shares["big"] + shares["small"] == pytest.approx(1)
    even = plan_cephalo(profile([Card("big", 3, GIB, steady(1.0))]), PlanRequest(global_batch=3))
    assert {w.state_share for w in even.workers} == {1 / 3}


def test_inputs_are_kept_on_the_host_where_that_is_known_and_allowed():
    cards = [Card("a", 1, GIB, steady(1.0), host_copy=line(1e-12)), Card("b", 1, GIB, steady(1.0))]
    made = profile(cards, kinds=[block(kept=line(1_000))])
    for space, boundary in ((EVERYTHING, "host"), (Space(checkpoints_on=("device",)), "device")):
        plan = plan_cephalo(made, PlanRequest(global_batch=4, space=space))
        kept = {w.device_class: w.mode.boundary for w in plan.workers}
        assert kept == {"a": boundary, "b": "device"}
        assert all(w.mode.recompute for w in plan.workers)


def test_a_batch_divided_by_a_factor_is_whole_again():
    made = fleet(4)
    for factor in (1, 3, 7, 20):
        plan = plan_at_factor(made, PlanRequest(global_batch=64), factor=factor)
        assert sum(w.samples for w in plan.workers) == 64
        odd = [w for w in plan.workers if w.samples % (factor * w.micro_batch)]
        assert len(odd) == (64 % factor > 0)


def test_the_factor_is_the_smallest_that_is_not_too_much(monkeypatch):
    made, request = fleet(4), PlanRequest(global_batch=64)
    exact = plan_at_factor(made, request)
    assert plan_cephalo(made, request) == exact
    monkeypatch.setattr(module, "MAX_CELLS", module.MAX_CELLS / 300)
    coarse = plan_cephalo(made, request)
    assert coarse == next(
        plan for f in range(2, 20) if (plan := plan_at_factor(made, request, factor=f)) == coarse
    )
    assert coarse.prediction.step_s > exact.prediction.step_s


def test_a_search_that_would_never_end_is_not_begun():
    with raises(InputError, code="cephalo-search-too-large", what=(1000, 8192)) as caught:
        plan_cephalo(fleet(1_000), PlanRequest(global_batch=8_192))
    assert "optimal" in caught.value.fix


def test_every_device_needs_a_sample():
    with raises(InputError, code="cephalo-batch-too-small", what=4):
        plan_cephalo(fleet(4), PlanRequest(global_batch=3))


@pytest.mark.parametrize(
    "space", [Space(zero_stages=(0, 2)), Space(gradient_checkpointing=(False,))]
)
def test_other_techniques_than_theirs_are_refused(space):
    with raises(InputError, code="cephalo-mode-not-allowed"):
        plan_cephalo(fleet(4), PlanRequest(global_batch=64, space=space))


def test_a_host_that_is_short_is_not_taken_for_its_devices():
    """At the size that comes nearest."""
    over, over_host = np.array([9, -5, -7]), np.array([0, 3, 8])
    assert Shortage.least(over, over_host) == Shortage(3, on_host=True)
    assert Shortage.least(over, np.zeros(3, dtype=int)) == Shortage()
    profile = fleet(4)
    setting = next(iterate_even_settings(profile, profile.cluster.devices, Space()))[0]
    error = make_policy_error("a plan", [(setting, {"t4": Shortage(3, on_host=True)})])
    assert "the host of device class 't4' is short of 3 bytes" in error.what
    assert "that its host has for it" in error.why


def test_the_class_that_is_short_is_named():
    with raises(NoFeasiblePlanError, code="policy-does-not-fit", what="t4"):
        plan_cephalo(fleet(4, memory_factor=0.3), PlanRequest(global_batch=64))
