"""A flat interval as boxes: exact, in order, contiguous, few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumix.engine.sharding.nd_boxes import split_into_boxes


@st.composite
def intervals(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=5)))
    cuts = draw(st.lists(st.integers(0, int(np.prod(shape))), min_size=2, max_size=2))
    return shape, min(cuts), max(cuts)


@settings(max_examples=60)
@given(intervals())
def test_boxes_are_the_interval(interval):
    shape, start, end = interval
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    found = split_into_boxes(shape, start, end)
    parts = [
        numbers[tuple(slice(o, o + s) for o, s in zip(offset, size))] for offset, size in found
    ]
    covered = [int(n) for part in parts for n in part.reshape(-1)]
    assert covered == list(range(start, end))
    for part in parts:
        flat = part.reshape(-1)
        assert part.size and np.array_equal(flat, np.arange(flat[0], flat[0] + part.size))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_without_dimensions():
    assert split_into_boxes((), 0, 1) == [((), ())]
    assert split_into_boxes((), 0, 0) == []


def test_one_dimension():
    assert split_into_boxes((9,), 2, 7) == [((2,), (5,))]


def test_two_dimensions():
    assert split_into_boxes((4, 10), 7, 33) == [
        ((0, 7), (1, 3)),
        ((1, 0), (2, 10)),
        ((3, 0), (1, 3)),
    ]
    assert split_into_boxes((4, 10), 12, 15) == [((1, 2), (1, 3))]
    assert split_into_boxes((4, 10), 10, 40) == [((1, 0), (3, 10))]


def test_no_elements():
    assert split_into_boxes((0, 3), 0, 0) == []


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 7)])
def test_an_interval_outside_is_refused(start, end):
    with pytest.raises(ValueError, match="not inside"):
        split_into_boxes((2, 3), start, end)
