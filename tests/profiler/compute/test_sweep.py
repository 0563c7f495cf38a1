"""How far the sweep over micro-batches goes: to the largest, to saturation, or out of time; and
again where an emulated device fell behind its speed."""

from __future__ import annotations

import pytest
import torch

from gpumix.hardware.device import open_device
from gpumix.profiler.compute import sweep
from gpumix.schema.cluster.cluster import DeviceClass
from helpers.devices.sweeps import costly_model, measure, sizes, virtual_time
from helpers.extended import left_out

CAP = 2**26  # little: a part of it is taken to time the optimizer


@pytest.fixture
def clock():
    with virtual_time() as clock:
        yield clock


@pytest.fixture
def cpu():
    with open_device(DeviceClass(name="one", accelerator="cpu", memory_bytes=CAP), 0) as runtime:
        yield runtime


@pytest.fixture
def emulated(clock):
    one = DeviceClass(name="one", accelerator="cpu", memory_bytes=CAP, emulate_flops_per_s=1e6)
    with open_device(one, 0) as runtime:
        yield runtime


# -- saturation ------------------------------------------------------------------------------------


def spends(clock, per_sample):
    """A model whose blocks take `per_sample(samples)` seconds for each of their samples."""
    return lambda: costly_model(lambda x: clock.spend(len(x) * per_sample(len(x))))


SPEEDS = [
    ({1: 8, 2: 6, 4: 4, 8: 2, 16: 1, 32: 0.5, 64: 0.4}, [1, 2, 4, 8, 16, 32, 64]),
    ({1: 4, 2: 3, 4: 2, 8: 2, 16: 2}, [1, 2, 4, 8, 16]),
    ({1: 4, 2: 2, 4: 3, 8: 4}, [1, 2, 4, 8]),
    ({1: 4, 2: 4, 4: 3, 8: 3, 16: 2, 32: 2, 64: 1}, [1, 2, 4, 8, 16, 32, 64]),
    ({1: 1, 2: 1, 4: 1}, [1, 2, 4]),
]


@pytest.mark.parametrize(
    ("per_sample", "measured"),
    left_out(SPEEDS, [SPEEDS[0], *SPEEDS[2:]]),
    ids=["always faster", "level", "slower", "level once at a time", "never faster"],
)
def test_it_ends_when_two_sizes_in_a_row_are_not_faster(cpu, clock, per_sample, measured):
    found = measure(cpu, spends(clock, per_sample.__getitem__), largest=64)
    assert sizes(found) == measured


@pytest.mark.extended
@pytest.mark.parametrize(("gain", "last"), [(0.018, 4), (0.022, 16)])
def test_a_gain_of_two_percent_is_worth_while(cpu, clock, gain, last):
    per_sample = {2**k: (1 + gain) ** -k for k in range(5)}
    found = measure(cpu, spends(clock, per_sample.__getitem__), largest=16)
    assert sizes(found)[-1] == last


ENDS = [(1, [1]), (2, [1, 2]), (11, [1, 2, 4, 8, 11])]


@pytest.mark.parametrize(("largest", "measured"), left_out(ENDS, ENDS[:2]))
def test_it_ends_with_the_global_batch(cpu, clock, largest, measured):
    found = measure(cpu, spends(clock, lambda samples: 1 / samples), largest=largest)
    assert sizes(found) == measured


# -- budget ----------------------------------------------------------------------------------------


def test_no_size_is_begun_that_would_end_after_the_budget(cpu, clock):
    """Each size takes 1.6 times as long as the one before, and is expected to take twice as long;
    with time for exactly so many it therefore stops one earlier."""
    model = spends(clock, lambda samples: samples**-0.3)
    begun, ends = clock.now, []
    whole = sizes(measure(cpu, model, largest=16, progress=lambda _: ends.append(clock.now)))
    reached = []
    for budget_s in [end - begun for end in ends]:
        begun = clock.now
        reached.append(sizes(measure(cpu, model, largest=16, budget_s=budget_s)))
        assert clock.now - begun <= budget_s * (1 + 1e-9)
    assert reached == [whole[:n] for n in (1, 1, 2, 3, 4)]


@pytest.mark.extended
def test_half_way_is_not_begun_after_the_budget(cpu, clock):
    """Running out of memory may take long too."""

    def cost(x):
        clock.spend(1.0)
        if len(x) == 8:
            clock.spend(1000.0)
            raise torch.OutOfMemoryError("out of memory")

    assert sizes(measure(cpu, lambda: costly_model(cost), largest=64, budget_s=200)) == [1, 2, 4]
    assert sizes(measure(cpu, lambda: costly_model(cost), largest=64)) == [1, 2, 4, 6]


def test_one_sample_is_measured_whatever_the_budget(cpu, clock):
    found = measure(cpu, spends(clock, lambda samples: 1 / samples), largest=8, budget_s=0)
    assert sizes(found) == [1]


# -- overruns --------------------------------------------------------------------------------------


class Busy:
    """Takes the CPU away from a block, for a second, the first `times` times."""

    def __init__(self, clock, times):
        self.clock, self.left, self.calls = clock, times, 0

    def __call__(self, x):
        self.calls += 1
        if self.left:
            self.left -= 1
            self.clock.spend(1.0)


def times_of(found):
    units = found.device_class.units.values()
    curves = [curve for unit in units for curve in (unit.forward, unit.backward)]
    return [value for curve in curves for value in curve.values]


def test_a_size_is_measured_again_where_the_device_overran(emulated, clock):
    quiet, busy = Busy(clock, 0), Busy(clock, 0)
    undisturbed = measure(emulated, lambda: costly_model(quiet), largest=1)
    busy.left = quiet.calls
    found = measure(emulated, lambda: costly_model(busy), largest=1)
    assert emulated.overruns >= quiet.calls
    assert busy.calls > quiet.calls
    assert times_of(found) == pytest.approx(times_of(undisturbed))


@pytest.mark.extended
def test_an_overrun_at_one_size_repeats_no_other(emulated, clock):
    quiet, seen = [], []
    measure(emulated, lambda: costly_model(lambda x: quiet.append(len(x))), largest=2)

    def cost(x):
        seen.append(len(x))
        if len(x) == 2 and seen.count(2) == quiet.count(2):  # the last time that it should run
            clock.spend(1.0)

    assert sizes(measure(emulated, lambda: costly_model(cost), largest=4)) == [1, 2, 4]
    assert seen.count(1) == quiet.count(1)
    assert seen.count(4) == quiet.count(2) < seen.count(2) < 2 * quiet.count(2)


def test_a_machine_that_is_always_too_busy_is_tried_three_times(emulated, clock):
    quiet, busy = Busy(clock, 0), Busy(clock, 10**9)
    assert measure(emulated, lambda: costly_model(quiet), largest=1).device_class.overruns == 0
    told = []
    found = measure(emulated, lambda: costly_model(busy), largest=1, progress=told.append)
    assert sizes(found) == [1]
    assert found.device_class.overruns > 0
    assert told[0].endswith(", too long: this machine was busy")
    # A time takes a forward, its recompute, and a forward whose graph is kept; that of the parts of
    # a backward, once, one more.
    assert busy.calls == quiet.calls + 2 * (3 * sweep.REPEATS + 1)
