"""Clocks, power and temperature of a process's GPU, as reported by the driver."""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType
from typing import Any

from gpumix.hardware.discovery.gpu_health import find_handle, open_nvml
from gpumix.schema.cluster.clocks import GpuClocks

SM, CHIP_SENSOR = 1, 0  # NVML's constants for the SM clock and the chip's temperature sensor


class ClockReader:
    """Reads a GPU from construction until `close`; a reading takes well under a millisecond.

    Args:
        uuid: UUID with prefix.
        ordinal: GPU index, used if NVML does not know the UUID.
    """

    def __init__(self, uuid: str, ordinal: int) -> None:
        self._stack = ExitStack()
        self._nvml: ModuleType | Any = self._stack.enter_context(open_nvml())
        self._handle: Any = None
        if self._nvml is not None:
            try:
                self._handle = find_handle(self._nvml, uuid, ordinal)
            except self._nvml.NVMLError:
                self._nvml = None

    def look(self) -> GpuClocks | None:
        """Return the current clocks, or None if the driver does not report them."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return None
        try:
            mhz = nvml.nvmlDeviceGetClockInfo(handle, SM)
        except nvml.NVMLError:
            return None
        return GpuClocks(sm_mhz=mhz, **self._others()) if mhz > 0 else None

    def close(self) -> None:
        """Release the driver."""
        self._nvml = None
        self._stack.close()

    def _others(self) -> dict[str, float]:
        nvml, found = self._nvml, {}
        for name, ask in (
            ("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3),
            ("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(self._handle, CHIP_SENSOR)),
        ):
            try:
                found[name] = float(ask())
            except nvml.NVMLError:  # this GPU lacks the sensor
                continue
        return found
