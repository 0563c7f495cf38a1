"""Samples of unlike length: the order in which like ones meet, and who takes which of a batch."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.data.loader import Loader
from gpumix.data.order.balance_by_length import assign_samples, compute_costs
from gpumix.data.order.global_order import MAX_POSITION, Cursor, GlobalOrder
from gpumix.data.order.length_buckets import BucketedOrder
from gpumix.data.order.sampler import ByLength, RankSampler
from gpumix.engine.model.deferred_init import build
from gpumix.schema.errors import InputError
from gpumix.schema.plan.batch_shares import get_batch_workers
from gpumix.schema.plan.plan import Prediction
from helpers.errors import raises
from helpers.samples.sources import Numbers
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, plan_for
from helpers.training.staging import rows, staged_plan

ALIKE = ByLength(bucketing=True, attention=0.01, window_batches=3)
AS_DRAWN = ByLength(attention=0.01)


def lengths_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(4, 1, n).clip(1, 999).astype(np.int32)


@given(
    n=st.integers(1, 60),
    batch=st.integers(1, 9),
    window=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_an_epoch_holds_each_sample_once(n, batch, window, seed):
    order = BucketedOrder(GlobalOrder(n, seed), lengths_of(n), batch, window_batches=window)
    for epoch in range(3):
        assert sorted(order.span(epoch * n, (epoch + 1) * n)) == list(range(n))


@given(
    n=st.integers(1, 60), batch=st.integers(1, 9), start=st.integers(0, 90), more=st.integers(0, 40)
)
def test_any_span_is_a_part_of_the_one_order(n, batch, start, more):
    made = [BucketedOrder(GlobalOrder(n, 1), lengths_of(n), batch, window_batches=3) for _ in "ab"]
    whole = made[0].span(0, 130)
    assert made[1].span(start, start + more).tolist() == whole[start : start + more].tolist()


def test_samples_of_like_length_meet_and_batches_are_shuffled():
    n, batch = 4096, 32
    lengths = lengths_of(n)
    plain = GlobalOrder(n, 0)
    bucketed = BucketedOrder(plain, lengths, batch, window_batches=64)

    def padding(order: GlobalOrder | BucketedOrder) -> float:
        drawn = lengths[order.span(0, n)].reshape(-1, batch)
        return 1 - drawn.sum() / (drawn.max(1) * batch).sum()

    assert padding(bucketed) < 0.1 < 0.6 < padding(plain)
    longest = lengths[bucketed.span(0, n)].reshape(-1, batch).max(1)
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.3


class Documents(Numbers):
    """Numbers that have lengths."""

    @property
    def lengths(self) -> np.ndarray:
        return lengths_of(self.n)


def test_a_place_in_a_bucketed_order_is_for_one_global_batch():
    def loader(batch: int, by_length: ByLength) -> Loader:
        return Loader(Documents(40), [batch], 0, by_length=by_length)

    with loader(4, ALIKE) as first, loader(4, ALIKE) as same, loader(8, ALIKE) as larger:
        next(first)
        same.load_state_dict(first.state_dict())
        assert next(same)["k"].tolist() == next(first)["k"].tolist()
        with raises(InputError, code="data-cursor-of-other-data"):
            larger.load_state_dict(first.state_dict())
    with loader(4, AS_DRAWN) as first, loader(8, AS_DRAWN) as larger:
        larger.load_state_dict(first.state_dict())


shares = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(lambda s: sum(s) > 0)


@given(one=shares, n=st.integers(1, 40), step=st.integers(0, 9), data=st.data())
@pytest.mark.parametrize("by_length", [ALIKE, AS_DRAWN])
def test_a_step_has_the_same_samples_by_every_plan(by_length, one, n, step, data):
    total = sum(one)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=2, max_size=2)))
    other = [cuts[0], cuts[1] - cuts[0], total - cuts[1]]
    cursor, lengths = Cursor(3, n, ""), lengths_of(n)

    def sets(counts: list[int]) -> list[list[int]]:
        courses = [
            RankSampler(cursor, counts, rank, lengths=lengths, by_length=by_length)
            for rank in range(len(counts))
        ]
        return [course.indices(step * total).tolist() for course in courses]

    found = sets(one)
    assert [len(own) for own in found] == one
    held = [sample for own in found for sample in own]
    assert sorted(held) == sorted(sample for own in sets(other) for sample in own)
    for own in found:
        assert lengths[own].tolist() == sorted(lengths[own], reverse=True)
    course = RankSampler(cursor, one, 0, lengths=lengths, by_length=by_length)
    assert course.tokens(step * total, (step + 1) * total) == lengths[held].sum()


@given(
    n=st.integers(1, 12),
    batch=st.integers(1, 5),
    places=st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted),
)
@pytest.mark.parametrize("by_length", [ALIKE, AS_DRAWN])
def test_tokens_of_several_epochs_are_those_of_their_samples(by_length, n, batch, places):
    lengths = lengths_of(n)
    course = RankSampler(Cursor(3, n, ""), [batch], 0, lengths=lengths, by_length=by_length)
    start, stop = (place * batch for place in places)
    read = [course.indices(position) for position in range(start, stop, batch)]
    assert course.tokens(start, stop) == sum(int(lengths[one].sum()) for one in read)


@pytest.mark.parametrize("by_length", [ALIKE, AS_DRAWN])
def test_a_place_far_ahead_is_counted_at_once(by_length):
    lengths = lengths_of(10)
    course = RankSampler(Cursor(3, 10, ""), [4], 0, lengths=lengths, by_length=by_length)
    epochs = MAX_POSITION // 10
    rest = course.tokens(10 * epochs, MAX_POSITION)
    assert course.tokens(0, MAX_POSITION) == epochs * int(lengths.sum()) + rest
    assert course.indices(MAX_POSITION).max() < 10


def test_bucketing_needs_lengths():
    with raises(InputError, code="sample-lengths-unknown"):
        Loader(Numbers(10), [4], 0, by_length=ALIKE)


def test_ranks_are_as_fast_as_predicted():
    """By a plan's prediction the second rank is as fast as the first, though it has fewer samples:
    memory may be why. What updates take does not count."""
    model = build(ARCHITECTURES["gpt2"].factory, 0)
    plan = plan_for(model, [Share(6, 3, 1), Share(2, 2, 1), Share(0, 0, 1)])
    assert (
        [taker.speed for taker in get_batch_workers(plan)]
        == [6, 2, 0]
        == [taker.speed for taker in get_batch_workers([6, 2, 0])]
    )
    none = {"memory_bytes": {}, "memory_limit_bytes": 0, "forward_s": 0, "backward_s": 0}
    workers = [
        {"device": f"d{n}", "optimizer_s": 1, "busy_s": busy, **none}
        for n, busy in enumerate([4, 2, 1])
    ]
    told = {"step_s": 1, "tokens_per_s": 1, "exposed_communication_s": 0, "workers": workers}
    plan = plan.model_copy(update={"prediction": Prediction.model_validate(told)})
    assert [taker.speed for taker in get_batch_workers(plan)] == [2, 2, 0]


def test_in_stages_samples_are_dealt_between_workers_of_the_first():
    plan = staged_plan("gpt2", rows([4, 2], [6]), zero_stage=1)
    workers = get_batch_workers(plan)
    assert [(worker.parts, worker.speed) for worker in workers] == [((0, 1), 4), ((2,), 2)]
    lengths = lengths_of(30)
    courses = [RankSampler(Cursor(0, 30, ""), plan, rank, lengths=lengths) for rank in range(3)]
    first, second, all_of_them = (course.indices(0).tolist() for course in courses)
    assert all_of_them == first + second
    assert lengths[first].tolist() == sorted(lengths[first], reverse=True)


def test_without_lengths_ranks_read_in_a_row():
    course = RankSampler(Cursor(3, 10, ""), [2, 3], 1)
    assert course.indices(5).tolist() == GlobalOrder(10, 3).span(7, 10).tolist()
    assert course.tokens(0, 5) is None


def ends(taken: list[np.ndarray], costs: np.ndarray, speeds: list[float]) -> list[float]:
    return [costs[own].sum() / speed for own, speed in zip(taken, speeds, strict=True)]


def best_end(costs: np.ndarray, counts: list[int], speeds: list[float]) -> float:
    """When the last worker is through, at best: by trying all that there is."""
    owners = [worker for worker, count in enumerate(counts) for _ in range(count)]
    return min(
        max(
            sum(c for c, own in zip(costs, dealt, strict=True) if own == worker) / speed
            for worker, speed in enumerate(speeds)
        )
        for dealt in set(permutations(owners))
    )


def test_dealing_is_near_what_is_best():
    """Few samples leave little choice; with more of them the rest between worst and best shrinks,
    as the test below says."""
    over = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        counts, speeds = ([4, 2, 1], [4.0, 2.0, 1.0]) if seed % 2 else ([3, 3], [1.0, 1.0])
        costs = compute_costs(rng.lognormal(5, 0.6, sum(counts)), 1e-3)
        taken = assign_samples(costs, counts, speeds)
        assert [len(own) for own in taken] == counts
        over.append(max(ends(taken, costs, speeds)) / best_end(costs, counts, speeds))
    assert min(over) >= 1 - 1e-12
    assert np.mean(over) < 1.1


@pytest.mark.parametrize("speeds", [[4.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
def test_ranks_of_unlike_speed_end_together(speeds):
    counts = [int(256 * speed / sum(speeds)) for speed in speeds]
    begins = np.cumsum([0, *counts])
    dealt, in_a_row = [], []
    for seed in range(20):
        costs = compute_costs(np.random.default_rng(seed).lognormal(5, 1.0, sum(counts)), 1e-4)
        rows = [np.arange(*pair) for pair in pairwise(begins)]
        for kept, taken in ((dealt, assign_samples(costs, counts, speeds)), (in_a_row, rows)):
            times = ends(taken, costs, speeds)
            kept.append(max(times) / (sum(costs) / sum(speeds)))
    assert np.mean(dealt) < 1.02 < 1.15 < np.mean(in_a_row)
