"""How often a run copies its state into memory, by what that takes."""

from __future__ import annotations

import pytest

from gpumix.train.state_keeper import choose_copy_interval


@pytest.mark.parametrize(
    ("copied_s", "step_s", "every"),
    [
        (0.0, 0.1, 1),
        (0.0005, 0.1, 1),
        (0.0095, 0.1, 10),  # a tenth of a step, which is short
        (0.05, 1.1, 1),  # a twentieth of a long one
        (0.2, 2.0, 2),
        (0.0, 0.0, 1),
    ],
)
def test_the_longer_a_step_the_more_a_copy_may_take(copied_s, step_s, every):
    assert choose_copy_interval(copied_s, step_s) == every
