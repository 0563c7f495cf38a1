"""GPUs are measured when they are warm; a run tells when they run at other clocks."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumix.hardware.discovery import gpu_clocks
from gpumix.hardware.discovery.gpu_clocks import ClockReader
from gpumix.profiler.compute import warm_up
from gpumix.schema.cluster.clocks import GpuClocks
from gpumix.train.monitor.clock_warnings import ClockMonitor
from gpumix.train.run_log.metrics import RankRecord

HOT = GpuClocks(sm_mhz=1410, power_watts=350.5, temperature_c=71)


class Driver:
    """NVML of one card, without the sensors in `lacks`."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, *lacks: str) -> None:
        self._lacks = lacks

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def _of(self, name: str, value: int) -> int:
        if name in self._lacks:
            raise self.NVMLError("not supported")
        return value

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self._of("clock", {1: 1410}[kind])

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._of("power", 350_500)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self._of("temperature", {0: 71}[sensor])


@pytest.mark.parametrize(
    ("driver", "uuid", "expected"),
    [
        (Driver(), "GPU-1", HOT),
        (Driver("power"), "GPU-1", GpuClocks(sm_mhz=1410, temperature_c=71)),
        (Driver("power", "temperature"), "GPU-1", GpuClocks(sm_mhz=1410)),
        (Driver("clock"), "GPU-1", None),
        (Driver(), "GPU-2", None),
        (None, "GPU-1", None),
    ],
)
def test_a_driver_is_asked_for_what_it_knows(driver, uuid, expected, monkeypatch):
    @contextmanager
    def here() -> Any:
        yield driver

    monkeypatch.setattr(gpu_clocks, "open_nvml", here)
    reader = ClockReader(uuid, 0)
    assert reader.look() == expected
    reader.close()
    assert reader.look() is None


def test_clocks_are_read_while_the_device_computes(monkeypatch):
    """Behind the warm-up, and with products under way."""
    done: list[str] = []
    runtime: Any = SimpleNamespace(
        torch_device=torch.device("cpu"),
        memory_limit_bytes=2**20,
        synchronize=lambda: done.append("synchronize"),
        clocks=lambda: done.append("clocks") or HOT,
    )
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kw: done.append("mm") or product(*args, **kw))
    assert warm_up.warm_up(runtime, torch.float32) is None
    assert not done, "a CPU is as it is"
    monkeypatch.setattr(warm_up, "is_gpu", lambda device: True)
    monkeypatch.setattr(warm_up, "WARM_UP_S", 0.01)
    assert warm_up.warm_up(runtime, torch.float32) == HOT
    assert done[:3] == ["synchronize", "mm", "synchronize"]
    assert done[-4:] == ["mm", "mm", "clocks", "synchronize"]


def _record(device_class: str, sm_mhz: float | None) -> RankRecord:
    return RankRecord("", device_class, 1.0, None, 0, sm_mhz=sm_mhz)


def test_a_class_whose_clock_stays_apart_is_told_of_once():
    classes = [
        SimpleNamespace(device_class="card", clocks=HOT),
        SimpleNamespace(device_class="unknown", clocks=None),
    ]
    profile, plan = (
        SimpleNamespace(classes=classes),
        SimpleNamespace(workers=[SimpleNamespace(device=f"d{n}") for n in range(3)]),
    )
    watch = ClockMonitor(profile)  # type: ignore[arg-type]

    def told(*mhz: float | None) -> list[Any]:
        names = ("card", "card", "unknown")
        records = [_record(name, one) for name, one in zip(names, mhz)]
        return watch.find_clock_changes(plan, records)  # type: ignore[arg-type]

    assert told(1410, 1005, 1) == []  # once is no reason
    assert told(1410, 1400, 1) == []
    assert told(None, 1005, 1) == []
    (found,) = told(1480, 1005, 1)
    assert found.event == "clocks"
    assert found.fields == {"device": "d1", "sm_mhz": 1005, "measured_sm_mhz": 1410}
    assert "d1 runs at 1005 MHz, class 'card' was measured at 1410 MHz" in found.text
    assert "up to 40% slower than predicted" in found.text
    assert told(1005, 1005, 1) == told(1005, 1005, 1) == []


def test_without_a_profile_nothing_is_compared():
    plan: Any = SimpleNamespace(workers=[SimpleNamespace(device="d0")])
    watch = ClockMonitor(None)
    for _ in range(3):
        assert watch.find_clock_changes(plan, [_record("card", 1.0)]) == []
