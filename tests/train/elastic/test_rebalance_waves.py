"""How samples of plans in several waves are dealt again, where ranks wait in each wave."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_rebalance import PLENTY, plan
from test_rebalance_room import fits, made

from gpumix.cost.predict import predict
from gpumix.schema.plan.plan import Plan
from gpumix.train.elastic.device_pace import DevicePace, slowest_s
from gpumix.train.elastic.rebalance_memory import (
    MovableSplitLimits,
    PredictedSplitLimits,
    predict_rebalanced_plan,
    with_shares,
)
from gpumix.train.elastic.rebalancer import WINDOW_STEPS, Rebalancer, SplitLimits
from gpumix.train.elastic.sample_dealer import SampleDealer, with_samples


def in_waves(*samples: int, waves: int, micro_batch: int = 4) -> Plan:
    one = plan(*samples, micro_batch=micro_batch)
    return Plan.model_validate(one.model_dump() | {"waves": waves})


def in_each_wave(made: Plan) -> list[tuple[int, ...]]:
    """The samples of each worker in each wave."""
    return [tuple(map(sum, worker.divide_micro_batches(made.waves))) for worker in made.workers]


def takes(made: Plan, paces: list[DevicePace]) -> float:
    """Of a step in which all wait for the slowest of each wave, and then update."""
    waves = list(zip(*in_each_wave(made)))
    works = [max(p.sample_s * n for p, n in zip(paces, wave)) for wave in waves[:-1]]
    return sum(works) + slowest_s(paces, waves[-1])


def watched(made: Plan, sample_s: list[float], steps: int = 40, most: int = PLENTY) -> list[Plan]:
    """The plans that a run goes through, from the given one."""
    limits = SplitLimits([most] * len(made.workers))
    rebalancer, plans = Rebalancer(made, limits, steps=10**6), [made]
    for _ in range(steps):
        times = [n * s for n, s in zip(rebalancer.samples, sample_s)]
        change = rebalancer.observe(times)
        if change is not None:
            plans.append(Plan.model_validate(with_samples(made, change.samples).model_dump()))
    return plans


# -- which split -----------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 24), min_size=2, max_size=3),
    st.integers(1, 6),
    st.integers(2, 4),
    st.data(),
)
def test_what_a_dealer_says_of_its_waves_is_what_the_plan_has(counts, size, waves, data):
    assume(max(-(-n // min(n, size)) for n in counts) >= waves)
    made = in_waves(*counts, waves=waves, micro_batch=size)
    paces = [DevicePace(data.draw(st.floats(0, 3)), data.draw(st.floats(0.1, 3))) for _ in counts]
    dealer, total = SampleDealer.of(made), sum(counts)
    for split in dealer.find_splits(total, paces, [total] * len(counts)):
        dealt = with_samples(made, split)
        assert Plan.model_validate(dealt.model_dump()) == dealt  # each wave has samples
        assert sum(split) == total and min(split) >= 1
        assert all(w.micro_batch <= size for w in dealt.workers)
        assert dealer.step_s(paces, split) == pytest.approx(takes(dealt, paces))
    assert with_samples(made, counts) == made.model_copy(update={"reasons": None})


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.floats(0.5, 3), st.integers(0, 40)), min_size=2, max_size=3),
    st.integers(8, 30),
)
def test_the_best_split_is_nearly_that_of_brute_force(waves, groups, total):
    """Of all splits, each cut as well as it may be."""
    paces, most = [DevicePace(0.0, s) for s, _ in groups], [limit for _, limit in groups]
    made = in_waves(*[16] * len(groups), waves=waves, micro_batch=16 // waves)
    dealer = SampleDealer.of(made)
    choices = [range(1, min(limit, total) + 1) if limit else (0,) for limit in most]
    whole = [counts for counts in itertools.product(*choices) if sum(counts) == total]
    whole = [counts for counts in whole if max(counts) >= waves]
    found = dealer.find_splits(total, paces, most)
    if not whole:
        assert not found
        return
    assume(found)
    assert all(n <= limit for n, limit in zip(found[0], most))
    best = min(dealer.step_s(paces, counts) for counts in whole)
    # A sample more or less in each wave of the slowest.
    assert dealer.step_s(paces, found[0]) <= best + max(s for s, _ in groups)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(2, 8))
def test_the_fullest_wave_is_hardly_fuller_than_the_mean(samples, size, waves):
    made = in_waves(waves * size, 1, waves=waves, micro_batch=size)
    dealt = with_samples(made, (samples, 1))
    if samples >= waves:
        Plan.model_validate(dealt.model_copy(update={"global_batch": samples + 1}).model_dump())
    fullest = max(in_each_wave(dealt)[0])
    even = -(-samples // waves)
    assert fullest <= even + -(-even // size)


# -- when ------------------------------------------------------------------------------------------


def test_a_device_that_slows_down_has_fewer_samples_in_each_wave():
    made = in_waves(16, 16, 16, waves=4)
    before, after = watched(made, [1.0, 1.0, 3.0])
    paces = [DevicePace(0.0, sample_s) for sample_s in (1.0, 1.0, 3.0)]
    assert takes(before, paces) == 48
    assert takes(after, paces) <= 24  # 5, 5 and 2 samples in each wave
    assert max(in_each_wave(after)[2]) == 2
    assert min(map(min, in_each_wave(after))) >= 1
    assert after.waves == 4


def test_it_gets_its_samples_back_when_it_is_as_fast_again():
    made = in_waves(16, 16, 16, waves=4)
    rebalancer = Rebalancer(made, SplitLimits([PLENTY] * 3), steps=10**6)
    seen = []
    for step in range(60):
        slow = 3.0 if step < 20 else 1.0
        times = [n * s for n, s in zip(rebalancer.samples, (1.0, 1.0, slow))]
        if rebalancer.observe(times) is not None:
            seen.append(with_samples(made, rebalancer.samples))
    assert [one.workers[2].samples < 16 for one in seen] == [True, False]
    assert seen[-1].stages == made.stages


def test_what_waves_cannot_use_is_no_gain():
    """A sample less in all makes no wave shorter: each of a device has one at least."""
    made = in_waves(4, 4, waves=4, micro_batch=1)
    assert watched(made, [1.0, 1.3]) == [made]


def test_noise_and_single_steps_change_nothing():
    made = in_waves(16, 16, waves=2, micro_batch=8)
    rebalancer = Rebalancer(made, SplitLimits([PLENTY] * 2), steps=10**6)
    for step in range(60):
        slow = 4.0 if step % (WINDOW_STEPS + 2) == 0 else 1.04
        assert rebalancer.observe([16.0, 16.0 * slow]) is None


# -- where memory stands in the way ----------------------------------------------------------------


def tight(waves: int = 2) -> tuple:
    found, _ = made((560, 560, 560))
    plan = made_in_waves(found, waves)
    return found, plan


def made_in_waves(found, waves: int) -> Plan:
    _, one = made((560, 560, 560))
    (stage,) = one.stages
    workers = tuple(
        w.model_copy(update={"samples": 4 * waves, "micro_batch": 4}) for w in stage.workers
    )
    changes = {
        "global_batch": 12 * waves,
        "stages": (stage.model_copy(update={"workers": workers}),),
        "waves": waves,
    }
    plan = one.model_copy(update=changes)
    return plan.model_copy(update={"prediction": predict(found, plan)})


def test_no_wave_has_more_samples_than_there_is_memory_for():
    found, plan = tight()
    limits = PredictedSplitLimits(found, plan)
    for number, most in enumerate(limits.most):
        assert most >= plan.workers[number].samples
        samples = [worker.samples for worker in plan.workers]
        samples[number] = most
        expected = predict(found, with_samples(plan, samples)).workers[number]
        assert expected.peak_bytes <= expected.memory_limit_bytes
        if most < plan.global_batch:
            samples[number] = most + 1
            expected = predict(found, with_samples(plan, samples)).workers[number]
            assert expected.peak_bytes > expected.memory_limit_bytes


@given(st.lists(st.sampled_from([1.0, 1.5, 3.0, 8.0]), min_size=3, max_size=3))
def test_state_moves_to_make_room_in_waves(factors):
    found, plan = tight()
    paces = [DevicePace(0.0, factor) for factor in factors]
    moved = MovableSplitLimits(found, plan).moved(paces)
    assert moved is not None
    assert sum(moved.samples) == plan.global_batch
    after = with_shares(with_samples(plan, moved.samples), moved.shares)
    assert fits(found, Plan.model_validate(after.model_dump()))


def test_a_plan_whose_devices_are_as_planned_stays():
    found, plan = tight()
    assert predict_rebalanced_plan(found, plan) is plan
