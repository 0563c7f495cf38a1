"""No rank stores more than is counted, where cuts are between blocks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.network.collective_times import BufferCuts
from gpumix.cost.peak_memory import _bound_sizes
from gpumix.schema.plan.splitting import cut_parameters

SHARES = (
    st.lists(st.integers(0, 20), min_size=1, max_size=12)
    .filter(any)
    .map(lambda weights: tuple(w / sum(weights) for w in weights))
)


@given(st.lists(st.integers(0, 5000), max_size=10), SHARES, st.sampled_from([1, 256]))
def test_intervals_are_within_what_is_counted(numels, shares, multiple):
    offsets = cut_parameters(numels, shares, multiple)
    most = _bound_sizes(sum(numels), shares, multiple)
    assert all(b - a <= bound for (a, b), bound in zip(pairwise(offsets), most, strict=True))
    assert sum(most) <= sum(numels) + (multiple if multiple > 1 else 0) * len(shares)


@given(st.integers(1, 8), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_intervals_that_count_as_equal_are(ranks, blocks):
    """Of parameters of whole blocks."""
    numels = [256 * n for n in blocks]
    offsets = cut_parameters(numels, (1 / ranks,) * ranks, 256)
    if BufferCuts.alike(ranks, 256).equal(sum(numels)):
        assert len({b - a for a, b in pairwise(offsets)}) == 1
