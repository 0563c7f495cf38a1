"""The global order: a bijection, the same everywhere, different per seed and epoch; its cursor."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.data.order.global_order import ORDER_VERSION, Cursor, GlobalOrder
from gpumix.schema.errors import InputError
from helpers.errors import raises

SEEDS = st.integers(0, 2**70)
EPOCHS = st.integers(0, 2**40)


def whole_epoch(n: int, seed: int, epoch: int) -> np.ndarray:
    return GlobalOrder(n, seed).indices(epoch, np.arange(n))


def test_every_small_epoch_is_a_permutation():
    for n in range(1, 400):
        assert sorted(whole_epoch(n, seed=n, epoch=3).tolist()) == list(range(n))


@given(n=st.integers(1, 30_000), seed=SEEDS, epoch=EPOCHS)
def test_any_epoch_is_a_permutation(n, seed, epoch):
    assert np.array_equal(np.sort(whole_epoch(n, seed, epoch)), np.arange(n))


@given(n=st.integers(2**20, 2**40), seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_large_orders_stay_in_range_and_never_repeat(n, seed, epoch, data):
    start = data.draw(st.integers(0, n - 5000))
    positions = np.concatenate([np.arange(start, start + 5000), [0, n - 1]])
    items = GlobalOrder(n, seed).indices(epoch, np.unique(positions))
    assert items.min() >= 0 and items.max() < n
    assert len(np.unique(items)) == len(items)


def test_the_largest_order_is_reached():
    items = GlobalOrder(2**60, 1).indices(0, np.array([0, 2**59, 2**60 - 1]))
    assert len(set(items.tolist())) == 3 and items.min() >= 0 and items.max() < 2**60


@given(seed=SEEDS, epoch=EPOCHS, positions=st.lists(st.integers(0, 999), min_size=1))
def test_access_is_random(seed, epoch, positions):
    order = GlobalOrder(1000, seed)
    alone = [int(order.indices(epoch, np.array([p]))[0]) for p in positions]
    assert order.indices(epoch, np.array(positions)).tolist() == alone


@given(seed=SEEDS, epoch=EPOCHS)
def test_seed_and_epoch_change_the_order(seed, epoch):
    here = whole_epoch(100, seed, epoch).tolist()
    assert here != whole_epoch(100, seed + 1, epoch).tolist()
    assert here != whole_epoch(100, seed, epoch + 1).tolist()


def test_all_permutations_of_four_come_about_equally_often():
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(1200):
        key = tuple(whole_epoch(4, 0, epoch).tolist())
        seen[key] = seen.get(key, 0) + 1
    assert len(seen) == 24
    assert sum((count - 50) ** 2 / 50 for count in seen.values()) < 60  # chi squared, 23 degrees


def test_the_order_looks_like_a_shuffle():
    n = 100_000
    items = whole_epoch(n, 1, 0)
    assert abs(np.abs(items - np.arange(n)).mean() / n - 1 / 3) < 0.005
    assert abs(np.corrcoef(items, np.arange(n))[0, 1]) < 0.02
    assert abs(np.corrcoef(items[1:], items[:-1])[0, 1]) < 0.02


def test_the_order_of_this_version_never_changes():
    """Whoever changes these numbers gives `ORDER_VERSION` a new value."""
    assert ORDER_VERSION == 1
    assert whole_epoch(10, 0, 0).tolist() == [7, 6, 4, 2, 9, 1, 8, 0, 3, 5]
    assert whole_epoch(10, 0, 1).tolist() == [7, 3, 6, 5, 8, 1, 2, 4, 0, 9]
    large = GlobalOrder(10**12, 42).indices(7, np.array([0, 1, 999_999_999_999]))
    assert large.tolist() == [791383317641, 615999915680, 747059244317]


@given(n=st.integers(1, 50), start=st.integers(0, 500), count=st.integers(0, 200), seed=SEEDS)
def test_a_span_runs_on_across_epochs(n, start, count, seed):
    epochs = (start + count) // n + 1
    endless = np.concatenate([whole_epoch(n, seed, epoch) for epoch in range(epochs)])
    span = GlobalOrder(n, seed).span(start, start + count)
    assert span.dtype == np.int64
    assert np.array_equal(span, endless[start : start + count])


def test_shape_is_kept_and_nothing_is_allowed():
    order = GlobalOrder(100, 0)
    grid = np.arange(12).reshape(3, 4)
    assert np.array_equal(order.indices(0, grid).reshape(-1), order.indices(0, grid.reshape(-1)))
    assert order.indices(0, np.empty(0, dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("position", [-1, 100])
def test_positions_outside_are_refused(position):
    with pytest.raises(IndexError):
        GlobalOrder(100, 0).indices(0, np.array([position]))


@pytest.mark.parametrize("n", [0, -1, 2**60 + 1])
def test_impossible_sizes_are_refused(n):
    with raises(InputError, code="sample-count-out-of-range", what=(1, 2)):
        GlobalOrder(n, 0)


CURSOR = Cursor(seed=3, n=100, fingerprint="abc")


def test_a_cursor_survives_json():
    state = json.loads(json.dumps(CURSOR.advanced(250).state_dict()))
    assert CURSOR.load_state_dict(state) == CURSOR.advanced(250)
    assert CURSOR.load_state_dict(state).epoch == 2


@pytest.mark.parametrize(
    ("key", "value"), [("seed", 4), ("n", 99), ("fingerprint", "xyz"), ("order_version", 0)]
)
def test_a_foreign_cursor_says_what_differs(key, value):
    with pytest.raises(InputError) as caught:
        CURSOR.load_state_dict({**CURSOR.state_dict(), key: value})
    assert f"{key} is {value!r} in the checkpoint" in caught.value.why
    assert str(caught.value).count("in the checkpoint") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position", -1),
        ("position", "1"),
        ("position", 10**40),
        ("n", None),
        ("fingerprint", 7),
    ],
)
def test_a_broken_cursor_is_refused(key, value):
    with raises(InputError, code="data-cursor-invalid", what=key):
        CURSOR.load_state_dict({**CURSOR.state_dict(), key: value})
