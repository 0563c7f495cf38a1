"""What is kept of the steps of a run: the newest, by their numbers."""

from __future__ import annotations

import pytest

from gpumix.train.monitor.step_history import KEPT_STEPS, NewestValues


def newest(count: int) -> NewestValues[int]:
    found = NewestValues[int]()
    for number in range(count):
        found.append(number)
    return found


@pytest.mark.parametrize("count", [0, 1, 7, KEPT_STEPS, 2 * KEPT_STEPS, 5 * KEPT_STEPS + 3])
def test_slices_are_those_of_all_as_far_as_they_are_known(count):
    found, every = newest(count), list(range(count))
    assert len(found) == count
    assert len(found[:]) <= 2 * KEPT_STEPS and found[:] == every[count - len(found[:]) :]
    for part in (slice(-5, None), slice(count - 3, None), slice(None, None), slice(2, None)):
        kept = found[part]
        assert kept == every[part][len(every[part]) - len(kept) :]
    assert found[-KEPT_STEPS:] == every[-KEPT_STEPS:]
    if count:
        assert (found[-1], found[count - 1]) == (count - 1, count - 1)


def test_a_value_that_is_no_longer_kept():
    found = newest(2 * KEPT_STEPS)
    assert found[KEPT_STEPS] == KEPT_STEPS
    with pytest.raises(IndexError, match="value 3 is no longer kept"):
        found[3]
