"""Samples by weight, counted by class, against the same done one device at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumix.planner.common.class_split import apportion
from helpers.plans.policies import by_largest_remainder

CLASSES = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 1.5, 7.0]), st.integers(0, 9), st.integers(1, 4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), CLASSES)
def test_counting_devices_is_the_same_as_listing_them(total, classes):
    weights, most, counts = (list(column) for column in zip(*classes))
    runs = apportion(total, weights, most, counts)
    if sum(m * n for m, n in zip(most, counts)) < total:
        assert runs is None
        return
    which = [c for c, count in enumerate(counts) for _ in range(count)]
    listed = by_largest_remainder(total, [weights[c] for c in which], [most[c] for c in which])
    assert sum(listed) == total
    for c, of_class in enumerate(runs):
        counted = [samples for samples, count in of_class for _ in range(count)]
        assert counted == [n for n, of in zip(listed, which) if of == c]


def test_the_largest_remainders_get_what_rounding_leaves():
    assert apportion(10, [3.0, 1.0], [10, 10], [1, 2]) == (((6, 1),), ((2, 2),))
    assert apportion(4, [1.0], [9], [3]) == (((2, 1), (1, 2)),)


def test_what_one_has_no_room_for_goes_to_the_others_by_weight():
    assert apportion(9, [4.0, 2.0, 1.0], [3, 9, 9], [1, 1, 1]) == (((3, 1),), ((4, 1),), ((2, 1),))


def test_beside_devices_that_take_no_time_the_others_get_nothing():
    assert apportion(5, [float("inf"), 1.0], [9, 9], [1, 1]) == (((5, 1),), ((0, 1),))
    assert apportion(5, [float("inf"), 1.0], [4, 9], [1, 1]) == (((4, 1),), ((1, 1),))


@pytest.mark.parametrize("total", [0, 1, 7])
def test_no_more_than_there_is_room_for(total):
    assert (apportion(total, [1.0], [3], [2]) is None) == (total > 6)
