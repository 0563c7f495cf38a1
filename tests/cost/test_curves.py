"""Interpolation keeps what was measured and never falls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.memory_layout.curves import MicroBatches, interpolate_bytes, interpolate_seconds
from gpumix.schema.plan.splitting import split_micro_batches
from helpers.plans.brute import curves
from helpers.plans.profiles import curve


def test_measured_points_are_exact_and_joined_by_lines():
    measured = curve(0.1, 0.3, 0.9, sizes=(1, 2, 4))
    assert interpolate_seconds(measured, [1, 2, 4]).tolist() == [0.1, 0.3, 0.9]
    assert interpolate_seconds(measured, 3) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "measured",
    [curve(1.0, 3.0, 4.0, sizes=(1, 2, 4)), curve(4.0, 4.0, 4.0, sizes=(1, 2, 4)),
     curve(2.0, sizes=(2,))],
)  # fmt: skip
def test_beyond_the_last_point_a_value_is_proportional(measured):
    assert interpolate_bytes(measured, 10) == pytest.approx(10.0)


def test_below_the_first_point_there_is_a_floor_and_nothing_is_free():
    latency = curve(5e-3, 9e-3, sizes=(1e6, 2e6))
    assert interpolate_seconds(latency, [0, 1, 1e5, 1e6]).tolist() == [0, 5e-3, 5e-3, 5e-3]


def test_memory_that_was_once_needed_may_be_needed_again():
    assert interpolate_bytes(curve(1.0, 3.0, 2.0), [1, 2, 3, 4]).tolist() == [1, 3, 3, 4]


def test_less_work_does_not_take_longer_than_more():
    assert interpolate_seconds(curve(1.0, 3.0, 2.0), [1, 2, 3, 6]).tolist() == [1, 2, 2, 4]


@given(curves(1.0))
def test_more_never_costs_less(measured):
    for values_at in (interpolate_bytes, interpolate_seconds):
        assert (np.diff(values_at(measured, np.arange(0, 20))) >= 0).all()


@given(curves(0.7), st.integers(0, 40), st.integers(1, 9))
def test_sums_run_over_the_micro_batches(measured, samples, size):
    size = min(size, samples)
    micro = MicroBatches.of([samples], [size])
    each = [float(interpolate_bytes(measured, n)) for n in split_micro_batches(samples, size)]
    assert micro.bytes(measured)[0] == pytest.approx(sum(each))
    assert micro.seconds(measured)[0] == pytest.approx(sum(each))
    assert micro.largest_bytes(measured)[0] == max(each, default=0.0)
    assert micro.smallest.tolist() == [(split_micro_batches(samples, size) or (0,))[-1]]
