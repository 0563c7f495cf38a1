"""How a batch is cut into micro-batches, and a flat buffer into the shares of its owners."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.splitting import (
    compute_shard_offsets,
    compute_shard_sizes,
    cut_parameters,
    split_micro_batches,
)
from gpumix.schema.plan.stage import Stage, Worker

WEIGHTS = st.one_of(st.just(0.0), st.integers(1, 1000).map(float), st.floats(1e-6, 1.0))
SHARES = (
    st.lists(WEIGHTS, min_size=1, max_size=40)
    .filter(lambda weights: sum(weights) > 0)
    .map(lambda weights: tuple(w / sum(weights) for w in weights))
)
NUMEL = st.one_of(st.integers(0, 100), st.integers(0, 2**40))


@given(NUMEL, SHARES)
@example(10, (0.0, 0.1, 0.2, 0.0, 0.7, 0.0))
@example(3, (0.1,) * 10)
@example(2**40, (1 / 3, 1 / 3, 1 / 3))
@example(7, (0.1, 0.2, 0.3, 0.4 - 1e-17, 0.0))
def test_a_cut_covers_the_buffer_in_order(numel, shares):
    offsets = compute_shard_offsets(numel, shares)
    assert len(offsets) == len(shares) + 1
    assert (offsets[0], offsets[-1]) == (0, numel)
    assert all(a <= b for a, b in pairwise(offsets))
    assert sum(compute_shard_sizes(numel, shares)) == numel


@given(NUMEL, SHARES)
def test_no_owner_is_more_than_one_element_off_its_share(numel, shares):
    for size, share in zip(compute_shard_sizes(numel, shares), shares, strict=True):
        assert abs(size - numel * share / sum(shares)) <= 1 + 1e-15 * 100 * numel


@given(NUMEL, SHARES)
def test_a_share_of_zero_owns_nothing(numel, shares):
    for size, share in zip(compute_shard_sizes(numel, shares), shares, strict=True):
        assert share > 0 or size == 0


@given(st.integers(0, 2**40), SHARES, st.data())
def test_rounding_does_not_drift_in_any_order(numel, shares, data):
    order = data.draw(st.permutations(range(len(shares))))
    sizes = compute_shard_sizes(numel, shares)
    permuted = compute_shard_sizes(numel, tuple(shares[i] for i in order))
    for position, original in enumerate(order):
        assert abs(permuted[position] - sizes[original]) <= 2
    exact = 0.0
    for offset, share in zip(compute_shard_offsets(numel, shares)[1:], shares, strict=True):
        exact += numel * share
        assert abs(offset - exact) <= 0.5 + 1e-15 * 100 * numel


@given(st.lists(st.integers(0, 3000), max_size=8), SHARES, st.sampled_from([1, 64, 256]))
def test_cuts_are_at_multiples_in_the_nearest_places(numels, shares, multiple):
    free, offsets = (cut_parameters(numels, shares, n) for n in (1, multiple))
    assert free == compute_shard_offsets(sum(numels), shares)
    begins = [sum(numels[:n]) for n in range(len(numels) + 1)]
    allowed = {
        begin + place
        for begin, numel in zip(begins, numels)
        for place in (*range(0, numel, multiple), numel)
    } | {0}
    assert list(offsets) == sorted(offsets)
    for offset, exact in zip(offsets, free, strict=True):
        assert offset in allowed
        assert abs(offset - exact) == min(abs(place - exact) for place in allowed)


def test_equal_shares_of_what_divides_are_equal():
    assert compute_shard_sizes(12, (0.25,) * 4) == (3, 3, 3, 3)
    assert compute_shard_offsets(12, (0.0, 1.0, 0.0)) == (0, 0, 12, 12)


@given(st.integers(0, 300), st.integers(1, 300))
def test_micro_batches_add_up_and_only_the_last_is_smaller(samples, micro_batch):
    parts = split_micro_batches(samples, micro_batch)
    assert sum(parts) == samples
    assert all(part == micro_batch for part in parts[:-1])
    assert all(0 < part <= micro_batch for part in parts)


def worker(device="a", samples=4, micro_batch=2, share=1.0):
    return Worker(
        device=device, device_class="x", samples=samples, micro_batch=micro_batch, state_share=share
    )


def test_a_worker_may_compute_nothing_or_store_nothing():
    assert worker(samples=0, micro_batch=0).micro_batches == ()
    assert worker(samples=5, share=0).micro_batches == (2, 2, 1)


@pytest.mark.parametrize(("samples", "micro_batch"), [(0, 1), (1, 0), (1, 2)])
def test_micro_batches_that_do_not_fit_the_samples(samples, micro_batch):
    with pytest.raises(ValidationError, match="worker 'a'"):
        worker(samples=samples, micro_batch=micro_batch)


def test_shares_add_up_to_one():
    stage = Stage(units=("h",), workers=(worker(share=0.5), worker("b", share=0.4)))
    with pytest.raises(ValidationError, match=r"0\.900000"):
        Plan(strategy="even", model="m", sequence_length=8, global_batch=8, stages=(stage,))


def test_shares_add_up_on_each_host_that_divides_the_state():
    workers = (
        worker(share=1.0),
        worker("b", share=0.25).model_copy(update={"host": "other"}),
        worker("c", share=0.75).model_copy(update={"host": "other"}),
    )
    plan = {"strategy": "even", "model": "m", "sequence_length": 8, "global_batch": 12}
    stages = (Stage(units=("h",), workers=workers),)
    assert Plan(**plan, stages=stages, sharding="host").sharding == "host"
    with pytest.raises(ValidationError, match=r"stage.* 2\b"):
        Plan(**plan, stages=stages)
    with pytest.raises(ValidationError, match=r"'other'.* 1\.5"):
        short = (*workers[:2], workers[2].model_copy(update={"state_share": 1.0 - 1e-9 + 0.25}))
        Plan(**plan, stages=(Stage(units=("h",), workers=short),), sharding="host")


def test_a_plan_names_a_device_once():
    stage = Stage(units=("h",), workers=(worker(share=0.5), worker(share=0.5)))
    with pytest.raises(ValidationError, match="device 'a'"):
        Plan(strategy="even", model="m", sequence_length=8, global_batch=8, stages=(stage,))
