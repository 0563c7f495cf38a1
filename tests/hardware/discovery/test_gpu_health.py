"""What the driver says of a GPU, also where it says little."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from gpumix.hardware.discovery.gpu_health import (
    GpuHealth,
    GpuReading,
    driver_versions,
    find_handle,
    open_nvml,
    read_gpu,
    read_health,
)


class NvmlError(Exception):
    pass


def unsupported(*_: object) -> object:
    raise NvmlError("Not Supported")


def fake(**changes) -> SimpleNamespace:
    """A driver of one healthy GPU of a data centre."""
    told = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"570.86.10",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetIndex": lambda _: 5,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 * 2**30, used=3 * 2**30),
        "nvmlDeviceGetTotalEccErrors": lambda _, kind, counter: {(1, 0): 0}[kind, counter],
        "nvmlDeviceGetRetiredPagesPendingStatus": unsupported,
        "nvmlDeviceGetRemappedRows": lambda _: (1, 0, 0, 0),
        "nvmlDeviceGetPersistenceMode": lambda _: 1,
        "nvmlDeviceGetPowerManagementLimit": lambda _: 300_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 400_000,
        "nvmlDeviceGetComputeMode": lambda _: 0,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
            SimpleNamespace(pid=7, usedGpuMemory=2**30),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ],
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 4,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=40),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x24,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 3,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8,
    }
    return SimpleNamespace(NVMLError=NvmlError, **told | changes)


def test_all_that_a_driver_tells():
    assert read_health(fake(), 0) == GpuHealth(
        index=5,
        memory_bytes=80 * 2**30,
        used_bytes=3 * 2**30,
        most_link=(4, 16),
        uncorrected=0,
        pages_pending=False,
        remap_failed=False,
        persistent=True,
        others=((7, 2**30), (8, 0)),
        power_watts=(300.0, 400.0),
    )


def test_rows_that_wait_for_a_reset_and_rows_that_ran_out():
    found = read_health(fake(nvmlDeviceGetRemappedRows=lambda _: (0, 1, 1, 1)), 0)
    assert found.pages_pending and found.remap_failed
    pages = read_health(fake(nvmlDeviceGetRetiredPagesPendingStatus=lambda _: 1), 0)
    assert pages.pages_pending and not pages.remap_failed


def test_a_card_that_tells_little():
    few = ("Index", "MemoryInfo")
    silent = {
        name: unsupported
        for name in vars(fake())
        if name.startswith("nvmlDeviceGet") and not name.endswith(few)
    }
    assert read_health(fake(**silent), 0) == GpuHealth(
        index=5, memory_bytes=80 * 2**30, used_bytes=3 * 2**30
    )


def test_a_compute_mode_that_lets_nobody_in():
    assert read_health(fake(nvmlDeviceGetComputeMode=lambda _: 2), 0).prohibited
    assert not read_health(fake(nvmlDeviceGetComputeMode=lambda _: 3), 0).prohibited  # one process


def test_a_look():
    assert read_gpu(fake(), 0, 0.05) == GpuReading(True, 0x24, (3, 8))


def test_a_gpu_is_found_by_its_uuid_before_its_number():
    assert find_handle(fake(), "GPU-12", 3) == "GPU-12"
    assert find_handle(fake(), "small-0", 3) == 3


def test_versions(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    assert driver_versions() == ("570.86.10", "12.8")


def test_without_a_driver_there_is_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake(nvmlInit=unsupported))
    with open_nvml() as nvml:
        assert nvml is None
    assert driver_versions() == ("", "")


@pytest.mark.parametrize("fails", [False, True])
def test_the_driver_is_given_back(monkeypatch, fails):
    shut = []
    nvml = fake(nvmlShutdown=lambda: shut.append(True))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    try:
        with open_nvml():
            if fails:
                raise NvmlError
    except NvmlError:
        pass
    assert shut == [True]
