"""Whether windows show a gain."""

from __future__ import annotations

import pytest

from gpumix.doctor.verdict import gain_of, hopeless


def test_the_gain_is_the_median_of_pairs_and_its_range():
    gain = gain_of([2.0, 2.2, 1.8, 2.0, 2.1], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert (gain.factor, gain.low, gain.high) == (2.0, 1.8, 2.2)
    assert gain.real and gain.pairs == 5
    assert gain.confidence == pytest.approx(0.9375)  # 1 - 2 / 2^5


def test_what_disturbs_both_windows_of_a_pair_says_nothing():
    """A machine that becomes three times as slow."""
    gain = gain_of([1.0, 3.0, 1.1], [0.5, 1.5, 0.55])
    assert gain.low == pytest.approx(2.0) and gain.high == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("before_s", "after_s"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([1.01, 1.01, 1.01], [1.0, 1.0, 1.0]),  # real, but not worth a setting
        ([1.5, 0.9, 1.5], [1.0, 1.0, 1.0]),  # one window says the opposite
        ([1.0, 1.0, 1.0], [1.5, 1.5, 1.5]),
    ],
)
def test_what_is_no_gain(before_s, after_s):
    assert not gain_of(before_s, after_s).real


def test_no_more_windows_where_three_show_nothing():
    assert hopeless([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert not hopeless([1.0, 1.0], [1.0, 1.0])  # too few
    assert not hopeless([1.0, 1.2, 1.2], [1.0, 1.0, 1.0])
