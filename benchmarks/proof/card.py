"""The GPU as its driver tells of it, without making a context on it: name, memory, clock, power."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

READINGS = ("sm_clock_mhz", "power_w", "temp_c")


@dataclass(frozen=True)
class Reading:
    """The card at one moment; None where the driver tells nothing."""

    sm_clock_mhz: int | None = None
    power_w: float | None = None
    temp_c: int | None = None


@dataclass(frozen=True)
class Card:
    """The first GPU that this process may use."""

    name: str
    memory_bytes: int
    handle: Any

    def read(self) -> Reading:
        """Clock, power and temperature now."""
        nvml = _nvml()
        values: dict[str, Any] = {}
        with suppress(nvml.NVMLError):
            values["sm_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(self.handle, nvml.NVML_CLOCK_SM)
        with suppress(nvml.NVMLError):
            values["power_w"] = round(nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3, 1)
        with suppress(nvml.NVMLError):
            sensor = nvml.NVML_TEMPERATURE_GPU
            values["temp_c"] = nvml.nvmlDeviceGetTemperature(self.handle, sensor)
        return Reading(**values)


def first_card() -> Card | None:
    """The first GPU that NVIDIA's driver shows to this process; None without a driver or a GPU."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        handle = _handle(nvml)
        name = nvml.nvmlDeviceGetName(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None
    return Card(name if isinstance(name, str) else name.decode(), int(memory.total), handle)


def _handle(nvml: Any) -> Any:
    """That of the first entry of CUDA_VISIBLE_DEVICES, which is a number or a UUID."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else -1)


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
