"""What a run does once in so many steps, and what that costs it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.train.run_log.interruption_cost import InterruptionCost


def whole_s(every: int, step_s: float, slowed_s: float, writes_s: float) -> float:
    """Seconds from one save to the next: steps take `slowed_s` while it is written, `step_s` else,
    and the next one begins when this one has ended."""
    now_s = 0.0
    for _ in range(every):
        left_s = max(0.0, writes_s - now_s)
        done = min(1.0, left_s / slowed_s)  # of the step, while it is written
        now_s += done * slowed_s + (1.0 - done) * step_s
    return max(now_s, writes_s)


@given(
    every=st.integers(1, 40),
    watched=st.integers(1, 8),
    slower=st.floats(1.0, 3.0),
    writes_s=st.floats(0.01, 2.0),
)
def test_steps_beside_it_are_slower(every, watched, slower, writes_s):
    """However many of them it lasts, and are watched."""
    step_s = 0.1
    # Without the wait for its end, if it lasts longer than all of them.
    took_s = min(whole_s(watched, step_s, slower * step_s, writes_s), watched * slower * step_s)
    save = InterruptionCost.of_steps(0.0, writes_s, usual_s=watched * step_s, took_s=took_s)
    expected = whole_s(every, step_s, slower * step_s, writes_s)
    assert every * step_s + save.compute_added_s(every * step_s) == pytest.approx(expected)


def test_steps_that_are_faster_beside_it_are_none():
    assert InterruptionCost.of_steps(0.2, 0.5, usual_s=1.0, took_s=0.9).compute_added_s(10.0) == 0.2
