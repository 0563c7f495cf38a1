"""Whether windows show a gain."""

from __future__ import annotations

import pytest

from gpumix.doctor.verdict import Gain, compute_gain, has_enough_pairs


def test_the_gain_is_the_median_of_pairs_and_its_range():
    gain = compute_gain([2.0, 2.2, 1.8, 2.0, 2.1], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert (gain.factor, gain.low, gain.high) == (2.0, 1.8, 2.2)
    assert gain.real and gain.pairs == 5
    assert gain.confidence == pytest.approx(0.9375)  # 1 - 2 / 2^5


@pytest.mark.parametrize(
    ("pairs", "out", "confidence"),
    # By tables of the sign test: the d-th of n on either side holds the median.
    [
        (3, 0, 0.75),
        (5, 0, 0.9375),
        (7, 0, 0.9844),
        (8, 1, 0.9297),
        (11, 2, 0.9346),
        (12, 2, 0.9614),
    ],
)
def test_of_many_pairs_the_outermost_do_not_count(pairs, out, confidence):
    gain = compute_gain([float(n) for n in range(1, pairs + 1)], [1.0] * pairs)
    assert (gain.low, gain.high) == (1.0 + out, float(pairs - out))
    assert gain.confidence == pytest.approx(confidence, abs=1e-4)


def test_what_disturbs_both_windows_of_a_pair_says_nothing():
    """A machine that becomes three times as slow."""
    gain = compute_gain([1.0, 3.0, 1.1], [0.5, 1.5, 0.55])
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
    assert not compute_gain(before_s, after_s).real


def test_a_gain_in_words():
    assert str(Gain(1.489, 1.4, 1.601, pairs=5)) == "1.49x as fast (1.40 to 1.60)"
    assert str(Gain(0.92, 0.9, 0.97, pairs=3)) == "8% slower, not advised"
    assert str(Gain(1.01, 0.97, 1.05, 5)) == "no clear gain: 1.01x as fast (0.97 to 1.05)"


@pytest.mark.parametrize(
    ("ratios", "ends"),
    [
        ([1.5, 1.5], False),  # too few
        ([1.0, 1.0, 1.0], True),  # most of three show nothing
        ([1.5, 1.5, 1.5], False),
        ([1.5] * 5, True),  # they agree
        ([1.5, 1.5, 0.9, 1.5, 1.5], False),  # one was disturbed, perhaps
        ([1.5, 1.5, 0.9, 1.5, 1.5, 1.5, 1.5, 1.5], True),  # it was
        ([1.5, 0.9] * 6, True),  # more would not make them agree
    ],
)
def test_how_many_windows_there_are(ratios, ends):
    assert has_enough_pairs(ratios, [1.0] * len(ratios), pairs=5) is ends
