"""The cut of a batch: contiguous, in rank order, whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.errors import InputError
from gpumix.schema.plan.batch_shares import get_batch_share
from helpers.errors import raises
from helpers.training.staging import rows, staged_plan

SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


@given(shares=SHARES)
def test_shares_tile_the_batch(shares):
    cuts = cuts_of(shares)
    assert [len(cut) for cut in cuts] == shares
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]


@given(shares=SHARES, data=st.data())
def test_a_short_batch_is_cut_whole_and_nobody_gets_more_than_usual(shares, data):
    total = data.draw(st.integers(0, sum(shares)))
    cuts = cuts_of(shares, total)
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
    assert cuts[-1].stop == total
    assert all(len(cut) <= full for cut, full in zip(cuts, shares, strict=True))


def cuts_of(shares, total=None):
    cuts = []
    for rank in range(len(shares)):
        (rows,) = get_batch_share(shares, rank).rows(total)
        cuts.append(rows)
    return cuts


def test_a_plan_of_one_stage_is_its_samples():
    plan = staged_plan("gpt2", rows([3, 0, 5]), zero_stage=1)
    assert [get_batch_share(plan, rank) for rank in range(3)] == [
        get_batch_share([3, 0, 5], rank) for rank in range(3)
    ]


@pytest.mark.parametrize("total", range(9))
def test_every_stage_reads_all_of_the_batch(total):
    """In whole micro-batches, which get smaller if the batch does."""
    plan = staged_plan("gpt2", rows([8], [4, 4], [6, 2]), zero_stage=3)
    for number in range(3):
        read = [r for k in plan.ranks_of(number) for r in get_batch_share(plan, k).rows(total)]
        assert sorted(n for rows_of_one in read for n in rows_of_one) == list(range(total))
        assert all(len(rows_of_one) <= 2 for rows_of_one in read)
    assert get_batch_share(plan, 0).rows() == plan.rows_of(0)


def test_numpy_integers_are_integers():
    assert get_batch_share(np.array([3, 0, 5]), 2) == get_batch_share([3, 0, 5], 2)


@pytest.mark.parametrize(
    ("shares", "rank", "says"),
    [
        ([1, -1], 0, {"code": "shares-not-integers", "what": 0}),
        ([1.5, 2], 0, {"code": "shares-not-integers"}),
        ([True, 2], 0, {"code": "shares-not-integers"}),
        ([0, 0], 0, {"code": "shares-empty"}),
        ([], 0, {"code": "shares-empty"}),
        ([4, 4], 2, {"code": "rank-out-of-range", "what": 2}),
        ([4, 4], -1, {"code": "rank-out-of-range", "what": -1}),
    ],
)
def test_unfit_shares_are_refused(shares, rank, says):
    with raises(InputError, **says):
        get_batch_share(shares, rank)
