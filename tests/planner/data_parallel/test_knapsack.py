"""Selections hold state and batch, and there is one wherever trying all of them finds one."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.planner.data_parallel.knapsack import FULL_STATE_SHARE, Staircase, select_steps


@st.composite
def staircases(draw, most_steps=200):
    """Room that falls by as much with every sample, to rounding: corners of a hull, or nearly."""
    first, steps = draw(st.integers(0, 300)), draw(st.integers(1, most_steps))
    room, each = draw(st.floats(0.1, 1.0)), draw(st.floats(1e-5, 0.1))
    share = room - each * np.arange(steps)
    samples = np.arange(first, first + steps)
    return Staircase.of(draw(st.integers(1, 4)), samples, np.where(share >= 0, share, -1.0))


@st.composite
def problems(draw, most_steps=200):
    """Staircases, and a batch that they just reach, or nearly, with one step for each device."""
    stairs = draw(st.lists(staircases(most_steps), min_size=1, max_size=3))
    one = [[(draw(st.integers(0, len(s.samples) - 1)), s.devices)] for s in stairs]
    samples, share = totals(stairs, one)
    whole = share * draw(st.sampled_from((1.0, 0.999, 1.001))) or 1.0
    scaled = [Staircase(s.devices, s.samples, s.share / whole) for s in stairs]
    return scaled, samples


def totals(stairs, selection):
    """Samples and shares of all devices."""
    runs = [(s, step, n) for s, runs in zip(stairs, selection) for step, n in runs]
    samples = sum(n * int(s.samples[step]) for s, step, n in runs)
    return samples, sum(n * float(s.share[step]) for s, step, n in runs)


@given(problems())
def test_what_is_selected_is_enough(problem):
    stairs, batch = problem
    selection = select_steps(stairs, batch)
    if selection is None:
        return
    assert [sum(n for _, n in runs) for runs in selection] == [s.devices for s in stairs]
    samples, share = totals(stairs, selection)
    assert samples >= batch
    assert share >= FULL_STATE_SHARE


@pytest.mark.parametrize("each", [0.001, 0.0011, 0.0013])
def test_room_that_falls_in_a_line_is_enough_to_the_last_sample(each):
    """The moves along it differ in price by rounding alone."""
    share = 0.3 - each * np.arange(200)
    line = Staircase.of(2, np.arange(200), np.where(share >= 0, share, -1.0))
    for step, room in enumerate(line.share.tolist()):
        scaled = [Staircase(2, line.samples, line.share / (2 * room))]
        selection = select_steps(scaled, 2 * step)
        assert selection is not None
        assert totals(scaled, selection)[0] >= 2 * step


@given(problems(most_steps=5))
def test_something_is_selected_wherever_there_is_something(problem):
    stairs, batch = problem
    every = product(
        *(combinations_with_replacement(range(len(s.samples)), s.devices) for s in stairs)
    )
    found = (totals(stairs, [[(n, 1) for n in steps] for steps in chosen]) for chosen in every)
    possible = any(samples >= batch and share >= FULL_STATE_SHARE for samples, share in found)
    assert (select_steps(stairs, batch) is not None) == possible
