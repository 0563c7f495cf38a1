"""What memory lets devices compute: never more than fits, and as much as brute force finds."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.predict import predict
from gpumix.schema.plan.plan import Collectives, Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile
from gpumix.train.elastic.device_pace import DevicePace, split_samples
from gpumix.train.elastic.rebalance_memory import (
    MovableSplitLimits,
    limit_samples_by_memory,
    predict_rebalanced_plan,
    with_shares,
)
from gpumix.train.elastic.sample_dealer import with_samples
from helpers.plans.profiles import Card, Network, block, line, profile, steady, with_tp_groups

BATCH = 12
MEMORIES = [(620, 570, 550), (560, 560, 560), (900, 550, 550)]  # KiB


@cache
def made(memories: tuple[int, ...], *, each: int = 1) -> tuple[Profile, Plan]:
    """Cards of equal speed and so much memory, KiB, `each` of a class, and an even plan for them at
    ZeRO stage 3."""
    cards = [
        Card(f"card{n}", each, kib * 1024, steady(0.01), optimizer_s_per_element=1e-8)
        for n, kib in enumerate(memories)
    ]
    bus = line(1e-9, 1e-5)
    network = Network(
        gather={"broadcast": bus},
        reduce={"all_to_all": bus},
        chosen=Collectives(gather="broadcast", reduce="all_to_all"),
    )
    units = [block(trainable=10_000, kept=line(4000), forward=line(8000), backward=line(16000))]
    found = profile(cards, kinds=units, network=network)
    return found, even(found)


def even(found: Profile, **changes: Any) -> Plan:
    """A plan of one stage in which all devices compute and store the same."""
    devices = found.cluster.devices
    samples, share = BATCH // len(devices), 1 / len(devices)
    part = {"samples": samples, "micro_batch": samples, "state_share": share}
    workers = tuple(Worker(device=d.id, device_class=d.device_class, **part) for d in devices)
    return Plan(
        strategy="by hand",
        model=found.model.fingerprint,
        sequence_length=found.sequence_length,
        global_batch=BATCH,
        stages=(Stage(units=found.model.calls, workers=workers),),
        collectives=found.collectives,
        **changes,
    )


def fits(found: Profile, plan: Plan) -> bool:
    expected = predict(found, plan).workers
    return all(one.peak_bytes <= one.memory_limit_bytes for one in expected)


@pytest.mark.parametrize("memories", MEMORIES)
def test_the_most_samples_are_those_that_fit(memories):
    found, plan = made(memories)
    for number, most in enumerate(limit_samples_by_memory(found, plan)):
        for count in range(1, BATCH + 1):
            samples = [4, 4, 4]
            samples[number] = count
            expected = predict(found, with_samples(plan, samples)).workers[number]
            within = expected.peak_bytes <= expected.memory_limit_bytes
            assert within == (count <= most), (number, count)


def test_of_tp_groups_the_ranks_need_not_be_in_the_order_of_the_stage():
    found, plan = made((620, 450), each=2)
    found = with_tp_groups(found, 2, faster=2.0)
    (stage,) = plan.stages
    of_groups = plan.model_copy(update={"stages": (stage.model_copy(update={"tensor": 2}),)})
    roomy, scarce = limit_samples_by_memory(found, of_groups)
    assert roomy > scarce
    (a, b), (c, d) = ((w.device for w in tp_group) for tp_group in of_groups.stages[0].tp_groups)
    for ranks in ((a, c, b, d), (c, d, a, b)):
        other = of_groups.model_copy(update={"ranks": ranks})
        assert limit_samples_by_memory(found, other) == (roomy, scarce)


@given(
    st.sampled_from(MEMORIES),
    st.lists(st.sampled_from([1.0, 1.5, 3.0, 8.0]), min_size=3, max_size=3),
)
def test_a_move_fits_and_is_no_slower_than_staying(memories, factors):
    found, plan = made(memories)
    paces = [DevicePace(0.0, factor) for factor in factors]
    room = MovableSplitLimits(found, plan)
    moved = room.moved(paces)
    assert moved is not None
    assert sum(moved.samples) == BATCH
    assert sum(moved.shares) == pytest.approx(1.0)
    assert min(moved.shares) >= 0.0
    after = with_shares(with_samples(plan, moved.samples), moved.shares)
    assert fits(found, Plan.model_validate(after.model_dump()))
    stays = split_samples(BATCH, paces, room.most)
    assert stays is not None
    assert slowest(paces, moved.samples) <= slowest(paces, stays)
    assert slowest(paces, moved.samples) <= 1.34 * best(found, plan, paces)


def slowest(paces: list[DevicePace], samples: tuple[int, ...]) -> float:
    return max(pace.seconds(n) for pace, n in zip(paces, samples))


def best(found: Profile, plan: Plan, paces: list[DevicePace]) -> float:
    """Of all splits, and shares in steps of a twentieth."""
    wholes = [s for s in itertools.product(range(1, BATCH), repeat=3) if sum(s) == BATCH]
    wholes.sort(key=lambda samples: slowest(paces, samples))
    for samples in wholes:
        if possible(found, plan, samples):
            return slowest(paces, samples)
    raise AssertionError("nothing fits")


@cache
def largest_shares(memories: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """Of each device and number of samples: how many twentieths of the state it has room for."""
    found, plan = made(memories)
    largest = {}
    for number, count in itertools.product(range(3), range(1, BATCH)):
        dealt = with_samples(plan, [count] * 3)

        def is_too_much(part: int, number: int = number, dealt: Plan = dealt) -> bool:
            shares = [(20 - part) / 40] * 3
            shares[number] = part / 20
            one = predict(found, with_shares(dealt, shares)).workers[number]
            return one.peak_bytes > one.memory_limit_bytes

        # Where a part fits, all smaller ones do.
        largest[number, count] = bisect_left(range(21), True, key=is_too_much) - 1
    return largest


def possible(found: Profile, plan: Plan, samples: tuple[int, ...]) -> bool:
    memories = tuple(c.memory_bytes // 1024 for c in found.cluster.classes)
    room = [largest_shares(memories)[number, count] for number, count in enumerate(samples)]
    return min(room) >= 0 and sum(room) >= 20


def test_as_little_as_possible_moves():
    found, plan = made(MEMORIES[1])
    moved = MovableSplitLimits(found, plan).moved([DevicePace(0.0, 1.0)] * 3)
    assert moved is not None
    assert moved.samples == (4, 4, 4)
    assert moved.shares == pytest.approx((1 / 3,) * 3)
    assert moved.seconds == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("padding", [1.2, 1.5, 3.0])
def test_padded_collectives_bound_what_a_device_can_store(padding):
    """The two small devices are the fast ones: their state goes to the large one."""
    found, plan = made((1200, 650, 650))
    bus = line(1e-9, 1e-5)
    padded = Collectives(gather="padded", reduce="padded", padding=padding)
    plan = plan.model_copy(update={"collectives": padded})
    network = Network(gather={"native": bus}, reduce={"native": bus}, chosen=padded)
    found = found.model_copy(update={"network": network.times, "collectives": padded})
    moved = MovableSplitLimits(found, plan).moved(
        [DevicePace(0.0, 4.0), DevicePace(0.0, 1.0), DevicePace(0.0, 1.0)]
    )
    assert moved is not None
    assert moved.samples == (1, 6, 5)
    assert 1 / 3 < moved.shares[0] <= padding / 3


def test_a_plan_settles_as_a_run_would_settle_it():
    cards = [
        Card(name, 1, 2**20, steady(seconds)) for name, seconds in (("fast", 0.01), ("slow", 0.05))
    ]
    found = profile(cards, kinds=[block(trainable=100)])
    plan = even(found, zero_stage=0)
    assert predict_rebalanced_plan(found, plan) is plan  # nobody knows what it takes
    plan = plan.model_copy(update={"prediction": predict(found, plan)})
    after = predict_rebalanced_plan(found, plan)
    assert [worker.samples for worker in after.workers] == [10, 2]
    assert after.prediction is not None
    assert after.prediction == predict(found, after)
    assert predict_rebalanced_plan(found, after) is after
