"""The peak by cause by hand, and what it depends on; `test_naive_walk.py` has any plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.memory_layout.activation_phases import list_peak_phases
from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.network.buckets import BucketGrouping, build_buckets
from gpumix.cost.peak_memory import (
    Activations,
    MemoryModel,
    compute_free_bytes,
    compute_usable_bytes,
)
from gpumix.planner.common.sharding_setting import make_setting
from gpumix.planner.common.strategy import DevicePart, PlanRequest, build_plan, list_devices_by_rank
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import PLAIN
from helpers.draws import examples
from helpers.plans.brute import small_profiles
from helpers.plans.profiles import GIB, Card, block, line, profile, root, steady
from helpers.plans.random_plans import links_of, plans_of

MANY = examples(10)


def one_worker(samples=4, micro_batch=2, **changes):
    """The prediction of the first of two equal workers, each with half of the state."""
    unit = block(
        trainable=1000, kept=line(10), gradient=line(20), forward=line(100), backward=line(300)
    )
    setting = profile(
        [Card("c", 2, GIB, steady(1.0), framework=7)],
        calls=("block",) * 3,
        kinds=[unit],
        root_unit=root(400, buffers=5, kept=line(3), head=line(1)),
        **changes,
    )
    devices = list_devices_by_rank(setting, PlanRequest(global_batch=1))
    part = DevicePart(samples, micro_batch, 0.5)
    plan = build_plan(
        make_setting(setting, devices, cap=1.0),
        strategy="by hand",
        global_batch=2 * samples,
        parts={d.id: part for d in devices},
    )
    return plan.prediction.workers[0]


def test_a_peak_by_hand():
    # It lies in the backward of the last call. Two of three units are there at a time, and two of
    # their gradients, so the first and the last take turns; all begin at multiples of 512 bytes.
    assert one_worker().memory_bytes == {
        "state": 16 * (400 + 3 * 1000) // 2,
        "replicas": 0,
        "buffers": 5,
        "gathered": 2048 + 2 * 4096,
        "gradients": 2048 + 2 * 4096 + 2 * 500 * 4,
        "activations": 4 * 3 + 3 * 4 * 10,
        "boundary gradients": 4 * 20,
        "working set": 2 * 300,
        "framework": 7,
    }


@MANY
@given(small_profiles(), st.data())
def test_a_share_within_the_capacity_always_fits(profile, data):
    """Whatever the other ranks' shares are, rounding of the cuts included."""
    plan = data.draw(plans_of(profile))
    links = links_of(profile, plan.collectives, tuple(w.state_share for w in plan.workers))
    model = MemoryModel(profile, links, len(plan.workers))
    for worker, expected in zip(plan.workers, plan.prediction.workers):
        micro = MicroBatches.of([worker.samples], [worker.micro_batch])
        free = compute_free_bytes(profile, worker.device_class)
        held = Activations(profile.model_of(worker.device_class), micro, PLAIN)
        capacity = float(model.demands(held).capacity(free, None)[0])
        if worker.state_share <= capacity:
            assert expected.peak_bytes <= expected.memory_limit_bytes
        divided = model.state(profile.model_of(worker.device_class)).sharded_bytes
        if worker.state_share > max(capacity, 0) + 0.2 and divided > 5000:
            assert expected.peak_bytes > expected.memory_limit_bytes


def test_the_moments_of_a_deep_model_are_as_few_as_of_a_shallow_one():
    def moments(depth):
        cards = [Card("c", 1, GIB, steady(1.0))]
        return list_peak_phases(profile(cards, calls=("block",) * depth).model)

    assert len(moments(200)) == len(moments(5))


def test_gradients_that_wait_beside_make_more_moments_only_where_more_of_them_wait_earlier():
    def moments(waiting):
        model = profile([Card("c", 1, GIB, steady(1.0))], calls=("block",) * len(waiting)).model
        return len(list_peak_phases(model.model_copy(update={"waiting": waiting})))

    assert moments((0.0, 1.0, 2.0, 3.0)) == moments((0.0, 0.0, 0.0, 0.0))
    assert moments((3.0, 1.0, 2.0, 0.0)) == moments((0.0, 0.0, 0.0, 0.0)) + 2


def laid_out(calls, joined=1):
    """Bytes of all whole parameters at stage 3, in blocks, and of all gradients."""
    cards = [Card("c", 2, GIB, steady(1.0))]
    model = profile(cards, calls=("block",) * len(calls), kinds=[block(trainable=128)]).model
    model = model.model_copy(update={"calls": tuple(calls)})
    buckets = build_buckets(model, BucketGrouping(joined))
    return buckets.full_bytes("fp32", 3) / 512, buckets.gradient_bytes(3) / 512


def test_few_buckets_are_there_at_a_time():
    assert laid_out("abcdefgh") == (2, 2)
    assert laid_out("abcdefgh", joined=2) == (4, 4)
    assert laid_out("abcdefgh", joined=8) == (8, 8)


def test_gradients_of_units_called_again_live_until_their_first_call_is_done():
    assert laid_out("abcabc") == (3, 3)


def test_a_unit_called_in_succession_is_there_once():
    assert laid_out("aaaa") == (1, 1)


def test_a_unit_that_is_called_twice_is_stored_once():
    cards = [Card("c", 1, GIB, steady(1.0))]
    twice = profile(cards, calls=("block",) * 4)
    model = twice.model.model_copy(update={"calls": ("a", "b", "a", "b")})
    shared = twice.model_copy(update={"model": model})
    links = links_of(shared, Collectives(), (1.0,))
    assert MemoryModel(shared, links, 1).state(model).sharded_bytes == 16 * 2000


@pytest.mark.parametrize(("accelerator", "usable"), [("cuda", 940), ("cpu", 980)])
def test_a_part_of_the_memory_is_kept_in_reserve(accelerator, usable):
    assert (
        compute_usable_bytes(DeviceClass(name="c", accelerator=accelerator, memory_bytes=1000))
        == usable
    )
