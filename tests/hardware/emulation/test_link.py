"""An emulated link between a device and its host."""

from __future__ import annotations

import pytest

from gpumix.hardware.emulation.link import EmulatedLink
from gpumix.hardware.emulation.timeline import Timeline
from helpers.virtual_clock import VirtualClock


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def link(clock):
    timeline = Timeline(1e9, clock=clock, sleep=clock.sleep)
    return EmulatedLink(100.0, timeline, clock=clock, sleep=clock.sleep)


def test_copies_of_a_direction_follow_each_other(link, clock):
    lane = link.towards("device")
    first, second = lane.carry(50), lane.carry(100)
    assert (first.at_s, second.at_s) == (100.5, 101.5)
    clock.spend(3.0)
    assert lane.carry(100).at_s == 104.0
    assert lane.last.at_s == 104.0


def test_directions_carry_at_the_same_time(link):
    assert link.towards("device").carry(100).at_s == link.towards("host").carry(100).at_s


def test_who_uses_what_comes_waits_and_earns_no_credit(link, clock):
    arrival = link.towards("device").carry(100)
    clock.spend(0.25)
    arrival.wait()
    assert clock.now == 101.0
    arrival.wait()
    assert clock.sleeps == [0.75]
    # The device had nothing to do for that time: it does not catch up on it.
    assert link._timeline.busy_until == 100.75
