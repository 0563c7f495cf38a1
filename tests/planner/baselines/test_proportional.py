"""Whale's policy against its algorithm written out for one device at a time."""

from __future__ import annotations

import cProfile
import pstats

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.peak_memory import Activations
from gpumix.planner.baselines.whale import plan_proportional
from gpumix.planner.common.strategy import PlanRequest
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.stage import Mode
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import small_profiles
from helpers.plans.policies import (
    by_largest_remainder,
    even_step,
    fits_evenly,
    parts_of,
    peaked,
    plan_by,
    ways,
)
from helpers.plans.profiles import GIB, Card, block, fleet, line, profile, steady

MANY = examples(4)


LAYERS = Space(zero_stages=3, gradient_checkpointing=True, state_on="device")


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(EVERYTHING, id="everything", marks=pytest.mark.extended),
        pytest.param(LAYERS, id="layers"),
    ],
)
@MANY
@given(profile=small_profiles(), batch=st.integers(1, 12))
def test_it_is_the_published_algorithm(space, profile, batch):
    profile = peaked(profile)
    steps = []
    for setting, mode in ways(profile, batch, space):
        for number in (1, 2, 4, 8, 16):
            samples = shifted(setting, mode, batch, number)
            if samples is not None:
                given_out = [
                    (device.id, n, size_of(setting, name, n, number))
                    for (name, device), n in zip(listed(setting), samples)
                ]
                steps.append(even_step(setting, mode, given_out, batch))
    plan = plan_by(plan_proportional, profile, batch, space)
    assert (plan is None) == (not steps)
    if plan is not None:
        assert plan.prediction.step_s == pytest.approx(min(steps), rel=1e-9)


def listed(setting):
    return [(name, device) for name, devices in setting.classes.items() for device in devices]


def size_of(setting, name, samples, number):
    return setting.largest_micro_batch(name, -(-samples // number))


def shifted(setting, mode, batch, number):
    """Samples of each device once memory holds; None if it never does."""
    names = [name for name, _ in listed(setting)]
    peaks = [setting.profile.cluster.class_named(name).peak_flops_per_s for name in names]
    samples = by_largest_remainder(batch, peaks, [batch] * len(names))
    if number > 1 and number // 2 >= max(samples):
        return None  # every sample is by itself with half as many micro-batches
    most, filled = {}, {}
    for name in set(names):
        size = [size_of(setting, name, n, number) for n in range(batch + 1)]
        fits = [fits_evenly(setting, name, mode, n, size[n]) for n in range(batch + 1)]
        most[name] = next((n for n in range(batch + 1) if not fits[n]), batch + 1) - 1
        held = [memory(setting, name, mode, n, size[n]) for n in range(batch + 1)]
        filled[name] = [max(held[: n + 1]) for n in range(batch + 1)]
    if min(most.values()) < 0:
        return None
    while over := [i for i, name in enumerate(names) if samples[i] > most[name]]:
        free = [i for i, name in enumerate(names) if samples[i] < most[name]]
        if not free:
            return None
        peak = min(over, key=lambda i: (-filled[names[i]][samples[i]], names[i], -samples[i], i))
        valley = min(free, key=lambda i: (samples[i] / peaks[i], filled[names[i]][samples[i]], i))
        moved = min(samples[peak] - most[names[peak]], most[names[valley]] - samples[valley])
        samples[peak] -= moved
        samples[valley] += moved
    return samples


def memory(setting, name, mode, samples, size):
    """The part of a device's usable memory that is filled, as the worker with an equal share."""
    demands = setting.memory.demands(
        Activations(setting.profile.model_of(name), MicroBatches.of([samples], [size]), mode)
    )
    held = demands.fixed_bytes
    if setting.zero_stage:
        held = held + demands.rounding + demands.per_share / len(setting.devices)
    measured = setting.profile.of_class(name)
    reserve = 0.06 if class_of(setting, name).accelerator == "cuda" else 0.02
    usable = int(class_of(setting, name).memory_bytes * (1 - reserve))
    return (held.max() + measured.framework_bytes) / usable


def class_of(setting, name) -> DeviceClass:
    return setting.profile.cluster.class_named(name)


def test_samples_follow_the_peaks_and_not_the_measured_speed():
    cards = [Card("a", 1, GIB, steady(1.0)), Card("b", 1, GIB, steady(1.0))]
    plan = plan_proportional(peaked(profile(cards)), PlanRequest(global_batch=8))
    assert [w.samples for w in plan.workers] == [6, 2]
    assert {w.state_share for w in plan.workers} == {0.5}
    assert {w.mode for w in plan.workers} == {Mode()}


def test_an_emulated_device_goes_by_its_stated_speed():
    made = profile([Card("a", 1, GIB, steady(1.0)), Card("b", 1, GIB, steady(1.0))])
    a, b = (
        c.model_copy(update={"emulate_flops_per_s": rate})
        for c, rate in zip(made.cluster.classes, (1e9, 3e9))
    )
    made = made.model_copy(update={"cluster": made.cluster.model_copy(update={"classes": (a, b)})})
    plan = plan_proportional(made, PlanRequest(global_batch=8))
    assert [w.samples for w in plan.workers] == [2, 6]


def test_what_overflows_goes_to_the_device_with_room():
    """Of 12 samples the fast card gets 9 by its peak; it has room for no more than 4."""
    unit = block(trainable=0, kept=line(1_000))
    cards = [Card("a", 1, 1, steady(1.0)), Card("b", 1, GIB, steady(1.0))]
    roomy = profile(cards, kinds=[unit])
    small = roomy.cluster.classes[0].model_copy(update={"memory_bytes": 17_000})
    cluster = roomy.cluster.model_copy(update={"classes": (small, roomy.cluster.classes[1])})
    made = peaked(roomy.model_copy(update={"cluster": cluster}))
    plan = plan_proportional(made, PlanRequest(global_batch=12))
    assert [n for _, n, _ in parts_of(plan)] == [4, 8]


def test_an_unknown_peak_is_asked_for():
    with raises(InputError, code="peak-flops-unknown", what="c") as caught:
        plan_proportional(profile([Card("c", 1, GIB, steady(1.0))]), PlanRequest(global_batch=4))
    assert "peak_flops" in caught.value.fix


def test_the_class_that_is_short_is_named():
    with raises(NoFeasiblePlanError, code="policy-does-not-fit", what="t4") as caught:
        made = peaked(fleet(4, memory_factor=0.9), [4e12, 2e12, 1e12, 3e12])
        plan_proportional(made, PlanRequest(global_batch=64))
    assert "optimal" in caught.value.fix


@pytest.mark.extended
def test_a_thousand_devices_take_few_calls():
    """As many as devices, not as pairs of them: 0.1 s."""
    made = peaked(fleet(1_000), [4e12, 2e12, 1e12, 3e12])
    counted = cProfile.Profile()
    plan = counted.runcall(plan_proportional, made, PlanRequest(global_batch=8_192))
    assert len(plan.workers) == 1_000
    assert pstats.Stats(counted).total_calls < 1_000_000
