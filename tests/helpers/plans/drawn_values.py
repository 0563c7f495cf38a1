"""What property tests draw."""

from __future__ import annotations

from hypothesis import strategies as st

from helpers.training.reference import Share


@st.composite
def _share(draw: st.DrawFn) -> Share:
    samples = draw(st.integers(0, 5))
    return Share(samples, draw(st.integers(min(1, samples), samples)), draw(st.integers(0, 3)))


def share_lists(max_world: int = 4) -> st.SearchStrategy[list[Share]]:
    """Shares of 1 to `max_world` ranks, some without samples, some without state."""
    return st.lists(_share(), min_size=1, max_size=max_world).filter(
        lambda shares: any(s.samples for s in shares) and any(s.state for s in shares)
    )
