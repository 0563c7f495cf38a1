"""What a device takes for its steps is told by its own time, where the host runs ahead of it."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from gpumix.data.loader import Loader
from gpumix.data.workers.autotune import MEASURED_STEPS, Limit
from gpumix.data.workers.step_timing import StepClock, TimedStep
from gpumix.hardware.timestamps import HostClock, StreamClock

STEP_S, LAUNCH_S, AHEAD = 0.04, 0.001, 3


class Device:
    """Takes `STEP_S` for a step; who gives it work goes on, and is stopped `AHEAD` steps before it.
    Stamps are numbers."""

    def __init__(self) -> None:
        self.host_s = self.free_s = 0.0

    def launch(self) -> None:
        self.host_s += LAUNCH_S
        self.free_s = max(self.free_s, self.host_s) + STEP_S
        self.host_s = max(self.host_s, self.free_s - AHEAD * STEP_S)

    def now(self) -> float:
        return max(self.host_s, self.free_s)

    def passed(self, stamp: float) -> bool:
        return stamp <= self.host_s

    def between(self, one: float, other: float) -> float:
        return other - one


def paced(
    device: Device, pace: StepClock[float], steps: int, waits_s: float = 0.0
) -> list[TimedStep]:
    found = []
    for _ in range(steps):
        pace.asked()
        device.host_s += waits_s
        pace.taken(ready=not waits_s)
        found += pace.told()
        device.launch()
    return found


def test_the_devices_time_is_told_and_not_that_of_giving_it_work():
    device = Device()
    found = paced(device, StepClock(device), 20)
    assert len(found) >= 20 - 1 - AHEAD - 1
    assert {round(step.device_s, 9) for step in found[1:]} == {STEP_S}
    assert {round(step.waited_s, 9) for step in found} == {0.0}
    device = Device()  # the host's clock says something else
    alone = paced(device, StepClock(HostClock(lambda: device.host_s)), AHEAD)
    assert all(step.device_s == pytest.approx(LAUNCH_S) for step in alone)


def test_a_wait_of_the_host_counts_as_far_as_the_device_stands_idle():
    device = Device()
    hidden = paced(device, StepClock(device), 20, waits_s=STEP_S / 2)
    assert sum(step.waited_s for step in hidden[AHEAD:]) == pytest.approx(0.0)
    late = paced(device, pace := StepClock(device), 20, waits_s=STEP_S * 2)
    assert late[-1].waited_s == pytest.approx(STEP_S)
    assert late[-1].device_s == pytest.approx(STEP_S + LAUNCH_S)
    pace.forget()
    assert pace.told() == []


class Remote:
    """Samples are waited for; they tell who read them."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, k: int) -> dict[str, Any]:
        time.sleep(5e-3)
        return {"k": k, "pid": os.getpid()}


def test_a_loader_has_as_many_workers_as_the_device_needs():
    """40 ms of waiting a batch, for a device that takes 40 ms: not for 1 ms of giving it work."""
    device = Device()
    with Loader(Remote(), [8], 0) as loader:
        loader._pace = StepClock(device)
        for _ in range(MEASURED_STEPS + AHEAD + 2):
            next(loader)
            device.launch()
        assert loader._tuner._jumped
        assert 1 < loader.setting.workers < 10
        assert loader.limit is Limit.UNKNOWN


@pytest.mark.extended
def test_a_loader_tunes_by_itself():
    """Nothing is set: several processes read for a device that waits for each batch."""
    with Loader(Remote(), [8], 0, cores=2) as loader:
        found = []
        for _ in range(MEASURED_STEPS + 30):
            found += next(loader)["pid"].tolist()
            time.sleep(5e-3)
        assert loader.setting.kind == "processes" and loader.setting.workers > 1
        assert len(set(found)) > 2 and os.getpid() in found[:8]
        assert len(loader.reasons) >= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_of_a_gpu_tell_its_time():
    device = torch.device("cuda:0")
    pace = StepClock(StreamClock(device))
    for _ in range(3):
        pace.asked()
        pace.taken(ready=True)
        torch.cuda._sleep(50_000_000)
    assert not pace.told()  # nothing was waited for
    torch.cuda.synchronize()
    (first, second) = pace.told()
    assert first.device_s > 0.005 and second.device_s > 0.005
    assert first.waited_s < 0.005
