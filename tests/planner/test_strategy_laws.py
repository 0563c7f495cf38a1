"""Laws that every policy obeys, whatever the profile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.job.search_space import EVERYTHING, Space
from helpers.draws import examples
from helpers.extended import left_out
from helpers.paths import TESTS
from helpers.plans.brute import plan_of, small_profiles
from helpers.plans.policies import peaked, plan_by
from helpers.plans.profiles import fleet, shuffled

LAYERS = Space(zero_stages=3, gradient_checkpointing=True, state_on="device")

EASY = examples(4)
BATCHES = st.integers(1, 12)
FURTHER = pytest.mark.extended
ALL = pytest.param(EVERYTHING, id="everything")
THEIRS = pytest.param(LAYERS, id="layers")
NAMES = ["proportional", "poplar", "cephalo", "best-subset"]
POLICIES = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("name", left_out(NAMES, NAMES[2:]))
@pytest.mark.parametrize("space", [ALL, pytest.param(LAYERS, id="layers", marks=FURTHER)])
@EASY
@given(profile=small_profiles(), batch=BATCHES)
def test_a_plan_is_whole_and_fits(name, space, profile, batch):
    profile = peaked(profile)
    plan = plan_by(STRATEGIES[name], profile, batch, space)
    assume(plan is not None)
    assert plan.strategy == name
    assert not space.missing(plan)
    assert sum(w.samples for w in plan.workers) == batch
    assert sum(w.state_share for w in plan.workers) == pytest.approx(1, abs=1e-9) or (
        plan.sharding == "host"
    )
    for worker, expected in zip(plan.workers, plan.prediction.workers):
        measured = profile.of_class(worker.device_class)
        assert expected.peak_bytes <= expected.memory_limit_bytes
        room = find_room_on_host(profile, worker.device_class)
        assert room is None or expected.host_bytes <= room
        assert worker.micro_batch <= (measured.largest_micro_batch or batch)


@pytest.mark.parametrize("name", ["proportional", "poplar", "cephalo"])
@pytest.mark.parametrize(
    "space", [THEIRS, pytest.param(EVERYTHING, id="everything", marks=FURTHER)]
)
@EASY
@given(profile=small_profiles(), batch=BATCHES)
def test_no_policy_is_faster_than_the_optimal_plan(name, space, profile, batch):
    plan = plan_by(STRATEGIES[name], peaked(profile), batch, space)
    assume(plan is not None)
    best = plan_of(profile, batch, space)
    assert best is not None
    assert best.prediction.step_s <= plan.prediction.step_s * (1 + 1e-9)


@POLICIES
@pytest.mark.parametrize(
    "space", [THEIRS, pytest.param(EVERYTHING, id="everything", marks=FURTHER)]
)
@EASY
@given(profile=small_profiles(), batch=BATCHES, dice=st.randoms(use_true_random=False))
def test_the_order_of_devices_and_classes_does_not_matter(name, space, profile, batch, dice):
    profile = peaked(profile)
    strategy, other = STRATEGIES[name], shuffled(profile, dice)
    assert plan_by(strategy, other, batch, space) == plan_by(strategy, profile, batch, space)


@pytest.mark.extended
def test_the_same_plans_under_any_hash_seed():
    code = (
        "from helpers.plans.profiles import fleet\n"
        "from helpers.plans.policies import peaked, plan_by\n"
        "from gpumix.planner.plan import STRATEGIES\n"
        "from gpumix.schema.job.search_space import EVERYTHING\n"
        "profile = peaked(fleet(8, memory_factor=0.7), [4e12, 2e12, 1e12, 3e12])\n"
        "for name, strategy in STRATEGIES.items():\n"
        "    print(name, plan_by(strategy, profile, 100, EVERYTHING))"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": search_path()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plans) == 1


IN_STAGES = ("staged", "model")  # which need to know what units need of each other


def search_path() -> str:
    return os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in IN_STAGES])
def test_a_policy_on_some_devices_uses_no_others(name):
    profile = peaked(fleet(8, memory_factor=2), [4e12, 2e12, 1e12, 3e12])
    some = tuple(d.id for d in profile.cluster.devices if d.device_class in ("a100", "a6000"))
    plan = STRATEGIES[name](profile, PlanRequest(global_batch=32, devices=some))
    assert {w.device for w in plan.workers} <= set(some)
