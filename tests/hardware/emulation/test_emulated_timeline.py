"""An emulated device takes FLOPs / rate, hides CPU time behind it, and owns up to overruns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.hardware.emulation.timeline import CREDIT_S, LEAD_S, Timeline
from helpers.virtual_clock import VirtualClock


@pytest.fixture
def clock():
    return VirtualClock()


def timeline(clock, rate=1e9):
    return Timeline(rate, clock=clock, sleep=clock.sleep)


def compute(device, clock, flops, *, cpu_s=0.0):
    """One operation that takes the CPU `cpu_s`."""
    device.begin()
    clock.spend(cpu_s)
    device.end(flops)


def seconds(rate, *, cpu_s, between_s=0.0, operations=100, flops=20_000_000):
    clock = VirtualClock()
    device = timeline(clock, rate)
    start = clock.now
    for _ in range(operations):
        clock.spend(between_s)
        compute(device, clock, flops, cpu_s=cpu_s)
    device.drain()
    assert device.overruns == 0
    return clock.now - start


def test_three_speeds_keep_their_exact_ratio_whatever_the_cpu_takes():
    took = [
        seconds(4e9, cpu_s=0.001),
        seconds(2e9, cpu_s=0.004, between_s=0.001),
        seconds(1e9, cpu_s=0.0, between_s=0.015),
    ]
    assert took == pytest.approx([0.5, 1.0, 2.0])


def test_operations_without_flops_are_hidden_behind_later_ones(clock):
    device = timeline(clock)
    start = clock.now
    for _ in range(10):
        clock.spend(0.03)  # longer than the 20 ms of one operation
        compute(device, clock, 20_000_000)
        compute(device, clock, 20_000_000)
    device.drain()
    assert clock.now - start == pytest.approx(10 * 0.04)
    assert device.overruns == 0


def test_short_leads_do_not_sleep_but_add_up(clock):
    device = timeline(clock)
    for _ in range(10):
        compute(device, clock, 500_000)
    assert len(clock.sleeps) == 2
    assert min(clock.sleeps) > LEAD_S


def test_an_overshoot_of_one_sleep_is_taken_off_the_next(clock):
    device = Timeline(1e9, clock=clock, sleep=lambda s: clock.sleep(s + 0.004))
    start = clock.now
    for _ in range(100):
        compute(device, clock, 20_000_000)
    assert clock.now - start == pytest.approx(2.0, abs=0.005)


def test_a_slow_cpu_is_an_overrun_by_what_exceeds_the_credit(clock):
    device = timeline(clock)
    compute(device, clock, 10_000_000, cpu_s=0.5)
    assert device.overruns == 1
    assert device.overrun_s == pytest.approx(0.5 - 0.010 - CREDIT_S)


def test_a_slow_host_between_operations_is_an_overrun_too(clock):
    device = timeline(clock)
    clock.spend(0.5)
    compute(device, clock, 1_000_000_000)
    assert (device.overruns, device.overrun_s) == (1, pytest.approx(0.5 - CREDIT_S))


def test_an_overrun_is_counted_once(clock):
    device = timeline(clock)
    clock.spend(0.5)
    for _ in range(5):
        compute(device, clock, 1000)
    assert device.overruns == 1


def test_a_wait_earns_no_credit(clock):
    device = timeline(clock)
    with device.waiting():
        clock.spend(10)
    start = clock.now
    compute(device, clock, 20_000_000)
    assert clock.now - start == pytest.approx(0.020)
    assert device.overruns == 0


def test_cpu_time_before_a_wait_is_still_hidden_after_it(clock):
    device = timeline(clock)
    clock.spend(0.005)
    with device.waiting(), device.waiting():
        clock.spend(10)
    start = clock.now
    compute(device, clock, 20_000_000)
    assert clock.now - start == pytest.approx(0.015)


def test_a_device_that_is_ahead_works_on_during_a_wait(clock):
    device = timeline(clock)
    compute(device, clock, 1_500_000)
    with device.waiting():
        clock.spend(0.001)
    assert device.busy_until - clock.now == pytest.approx(0.0005)


def test_a_wait_that_fails_earns_no_credit_either(clock):
    device = timeline(clock)
    with pytest.raises(RuntimeError), device.waiting():
        clock.spend(10)
        raise RuntimeError
    assert device.busy_until == clock.now


def test_idle_forgets_the_lag(clock):
    device = timeline(clock)
    clock.spend(10)
    device.idle()
    start = clock.now
    compute(device, clock, 20_000_000)
    assert clock.now - start == pytest.approx(0.020)
    assert device.overruns == 0


def test_drain_waits_for_the_device_and_only_then(clock):
    device = timeline(clock)
    compute(device, clock, 1_500_000)
    device.drain()
    assert clock.sleeps == [pytest.approx(0.0015)]
    device.drain()
    assert len(clock.sleeps) == 1


def test_reset_starts_a_measurement(clock):
    device = timeline(clock)
    compute(device, clock, 10, cpu_s=1.0)
    clock.spend(1.0)
    device.reset()
    assert (device.flops, device.overruns, device.overrun_s) == (0, 0, 0.0)
    assert device.busy_until == clock.now


def test_an_interrupted_sleep_passes_and_leaves_the_device_consistent(clock):
    def interrupted(seconds):
        clock.spend(seconds / 2)
        raise KeyboardInterrupt

    device = Timeline(1e9, clock=clock, sleep=interrupted)
    with pytest.raises(KeyboardInterrupt):
        compute(device, clock, 20_000_000)
    assert device.busy_until - clock.now == pytest.approx(0.010)
    assert device.flops == 20_000_000


@given(
    work=st.lists(
        st.tuples(st.integers(0, 10**8), st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 1)),
        max_size=30,
    )
)
def test_time_is_flops_over_rate_plus_waits_plus_overruns_within_the_credit(work):
    clock = VirtualClock()
    device = timeline(clock)
    start, waited = clock.now, 0.0
    for flops, cpu_s, between_s, wait_s in work:
        compute(device, clock, flops, cpu_s=cpu_s)
        clock.spend(between_s)
        device.drain()
        with device.waiting():
            clock.spend(wait_s)
        waited += wait_s
    device.begin()
    owed = device.flops / 1e9 + waited + device.overrun_s
    assert -1e-5 <= (clock.now - start) - owed <= CREDIT_S + 1e-5
