"""What binds a step, and what is waited for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.plan.stage import Mode
from gpumix.simulate.events import simulate
from gpumix.simulate.timeline import compute_utilization, find_critical_path, list_critical_segments
from helpers.draws import examples
from helpers.plans.brute import small_profiles
from helpers.plans.profiles import block, line
from helpers.plans.replays import any_plans, cards, plan_by_hand, wire

EASY = examples(8)


@EASY
@given(small_profiles(), st.data())
def test_the_critical_path_is_connected_and_as_long_as_the_step(profile, data):
    replay = simulate(profile, data.draw(any_plans(profile)))
    path = find_critical_path(replay)
    assert all(one.end == other.start for one, other in pairwise(path))
    assert (path[0].start if path else 0.0) == 0.0
    assert (path[-1].end if path else 0.0) == replay.step_s
    assert sum(event.seconds for event in path) == pytest.approx(replay.step_s)


@EASY
@given(small_profiles(), st.data())
def test_like_events_are_joined(profile, data):
    replay = simulate(profile, data.draw(any_plans(profile)))
    joined, path = list_critical_segments(replay), find_critical_path(replay)
    assert sum(stretch.events for stretch in joined) == len(path)
    assert sum(s.seconds for s in joined) == pytest.approx(replay.step_s)
    assert len({(stretch.kind, stretch.lane) for stretch in joined}) == len(joined)


def test_the_path_of_a_step_that_the_slow_card_binds():
    measured = cards((1.0, 2.0), calls=3, network=wire(0.1, 0.1))
    replay = simulate(measured, plan_by_hand(measured, (2, 2)))
    assert [
        (s.kind, s.lane, s.events, s.first, s.last) for s in list_critical_segments(replay)
    ] == [
        ("gather", None, 1, "(root)", "(root)"),
        ("forward", 1, 4, "(root)", "layers.2"),
        ("head", 1, 1, "(root)", "(root)"),
        ("backward", 1, 3, "layers.2", "layers.0"),
        ("reduce", None, 2, "layers.0", "(root)"),
        ("optimizer", 1, 1, "(root)", "(root)"),
    ]


def test_the_path_of_a_step_that_the_network_binds():
    measured = cards((1e-3, 2e-3), calls=3, network=wire(5.0, 7.0))
    replay = simulate(measured, plan_by_hand(measured, (2, 2)))
    moved = sum(s.seconds for s in list_critical_segments(replay) if s.lane is None)
    assert moved > 0.99 * replay.step_s
    for use in compute_utilization(replay):
        assert use.idle_s["gather"] > use.idle_s["slower rank"]
        assert use.idle_s["reduction"] > use.idle_s["slower rank"]


def test_the_fast_card_waits_for_the_slow_one():
    measured = cards((1.0, 2.0))
    fast, slow = compute_utilization(simulate(measured, plan_by_hand(measured, (2, 2))))
    assert slow.idle_s["slower rank"] == 0
    assert fast.idle_s["slower rank"] == pytest.approx(slow.busy_s - fast.busy_s)


def test_what_nothing_hides_are_the_ends():
    measured = cards((1.0, 1.0), network=wire(3.0, 3.0), overhead=0.5)
    for use in compute_utilization(simulate(measured, plan_by_hand(measured, (9, 9)))):
        assert use.idle_s["ends"] == pytest.approx(9.0)
        assert use.idle_s["overhead"] == pytest.approx(0.5)


def test_a_rank_without_samples_waits_from_beginning_to_end():
    measured = cards((1.0, 2.0), network=wire(0.5, 0.5))
    replay = simulate(measured, plan_by_hand(measured, (4, 0), shares=(1.0, 0.0)))
    computing, storing = compute_utilization(replay)
    assert storing.busy_s == 0
    assert storing.idle_s["slower rank"] > 0.5 * computing.busy_s
    assert sum(storing.idle_s.values()) == pytest.approx(replay.step_s)


def test_copies_that_take_longer_than_computing_are_waited_for():
    measured = cards((1e-3,), calls=2)
    kinds = (block(kept=line(2.0**30)),)
    measured = measured.model_copy(
        update={"model": measured.model.model_copy(update={"kinds": kinds})}
    )
    plan = plan_by_hand(measured, (1,), modes=(Mode(boundary="host"),))
    [use] = compute_utilization(simulate(measured, plan))
    copied = 1e-3 * 2**30
    assert use.idle_s["host copies"] == pytest.approx(4 * copied, rel=1e-3)


def test_a_rank_that_waits_for_its_own_copies_waits_for_nobody_else():
    measured = cards((1e-3, 1e-3), calls=2, network=wire(1e-3, 1e-3))
    kinds = (block(kept=line(100.0 * 2**10)),)
    measured = measured.model_copy(
        update={"model": measured.model.model_copy(update={"kinds": kinds})}
    )
    modes = (Mode(boundary="host"), Mode())
    copying, other = compute_utilization(
        simulate(measured, plan_by_hand(measured, (1, 1), modes=modes))
    )
    assert copying.idle_s["slower rank"] == pytest.approx(0, abs=1e-9)
    assert other.idle_s["slower rank"] > 100
