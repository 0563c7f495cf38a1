"""The cut of a batch: contiguous, in rank order, whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.data.shares import check_shares, share, short_share
from gpumix.spec.errors import InputError

SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


@given(shares=SHARES)
def test_shares_tile_the_batch(shares):
    cuts = [share(shares, rank) for rank in range(len(shares))]
    assert [stop - start for start, stop in cuts] == shares
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]


@given(shares=SHARES, data=st.data())
def test_a_short_batch_is_cut_whole_and_nobody_gets_more_than_usual(shares, data):
    total = data.draw(st.integers(0, sum(shares)))
    cuts = [short_share(shares, rank, total) for rank in range(len(shares))]
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert cuts[-1][1] == total
    assert all(0 <= b - a <= full for (a, b), full in zip(cuts, shares, strict=True))


def test_numpy_integers_are_integers():
    assert check_shares(np.array([3, 0, 5]), 1) == (3, 0, 5)


@pytest.mark.parametrize(
    ("shares", "rank", "says"),
    [
        ([1, -1], 0, "0 or more"),
        ([1.5, 2], 0, "integers"),
        ([True, 2], 0, "integers"),
        ([0, 0], 0, "add up to nothing"),
        ([], 0, "add up to nothing"),
        ([4, 4], 2, "no rank 2"),
        ([4, 4], -1, "no rank -1"),
    ],
)
def test_unfit_shares_are_refused(shares, rank, says):
    with pytest.raises(InputError, match=says):
        check_shares(shares, rank)
