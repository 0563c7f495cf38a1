"""Health of NVIDIA GPUs as reported by the driver: errors, throttling, links, processes.

Uses NVML, so neither torch nor a CUDA context is needed. Values not reported by a GPU or driver are
None.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from gpumix.schema.value import Value

T = TypeVar("T")

# Bits of NVML's clocks event reasons, except idling and clocks set by a user.
THROTTLE_REASONS = {
    0x04: "it reaches its power limit",
    0x08: "its hardware slows it down",
    0x20: "it is too warm",
    0x40: "it is far too warm",
    0x80: "an external power brake slows it down",
}
_UNCORRECTED, _SINCE_START = 1, 0  # NVML's constants for types of memory errors
_PROHIBITED = 2  # NVML's compute mode without any contexts


@dataclass(frozen=True)
class GpuReading:
    """A reading of a GPU.

    Attributes:
        used: True if the GPU is computing.
        reasons: NVML's bits for clock throttling.
        link: current generation and width of the PCIe link.
    """

    used: bool
    reasons: int
    link: tuple[int, int]


class GpuHealth(Value):
    """Health of an idle GPU.

    Attributes:
        index: GPU index in `nvidia-smi`.
        most_link: largest possible generation and width of the PCIe link in this slot.
        uncorrected: uncorrectable memory errors since the driver started.
        pages_pending: True if failed memory is retired at the next restart.
        remap_failed: True if no spare memory is left for replacement.
        others: other processes and the bytes of each; 0 if unknown.
        power_watts: power limit, and default power limit.
    """

    index: int
    memory_bytes: int
    used_bytes: int
    most_link: tuple[int, int] | None = None
    uncorrected: int | None = None
    pages_pending: bool | None = None
    remap_failed: bool | None = None
    persistent: bool | None = None
    prohibited: bool = False
    others: tuple[tuple[int, int], ...] = ()
    power_watts: tuple[float, float] | None = None


@contextmanager
def open_nvml() -> Iterator[ModuleType | None]:
    """Initialize NVML; yield None without a driver, or if it does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver_versions() -> tuple[str, str]:
    """Return the versions of the driver and of its newest CUDA ("12.4"); empty without a driver."""
    with open_nvml() as nvml:
        if nvml is None:
            return "", ""
        version = _query(nvml, nvml.nvmlSystemGetDriverVersion) or ""
        return version.decode() if isinstance(version, bytes) else str(version), read_newest_cuda(
            nvml
        )


def read_newest_cuda(nvml: ModuleType | Any) -> str:
    """Return the newest CUDA version supported by the driver, such as "12.4"; empty if unknown."""
    cuda = _query(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""


def find_handle(nvml: ModuleType | Any, uuid: str, index: int) -> Any:
    """Return the GPU with the UUID; if `uuid` is not one, the GPU at `index`."""
    if uuid.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    return nvml.nvmlDeviceGetHandleByIndex(index)


def read_health(nvml: ModuleType | Any, handle: Any) -> GpuHealth:
    """Return the driver's report on a GPU not used by this process."""

    def ask(function: Callable[..., T], *args: Any) -> T | None:
        return _query(nvml, function, handle, *args)

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    rows = ask(nvml.nvmlDeviceGetRemappedRows)
    pages = ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)
    told = [bool(one) for one in (pages, rows[2] if rows else None) if one is not None]
    persistent = ask(nvml.nvmlDeviceGetPersistenceMode)
    limit = ask(nvml.nvmlDeviceGetPowerManagementLimit)
    usual = ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    return GpuHealth(
        index=int(nvml.nvmlDeviceGetIndex(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        most_link=_query(nvml, read_max_link, nvml, handle),
        uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, _UNCORRECTED, _SINCE_START),
        pages_pending=any(told) if told else None,
        remap_failed=bool(rows[3]) if rows else None,
        persistent=None if persistent is None else bool(persistent),
        prohibited=ask(nvml.nvmlDeviceGetComputeMode) == _PROHIBITED,
        others=tuple(
            (int(process.pid), int(process.usedGpuMemory or 0))
            for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()
            if process.pid != os.getpid()
        ),
        power_watts=None if limit is None or usual is None else (limit / 1e3, usual / 1e3),
    )


def read_gpu(nvml: ModuleType | Any, handle: object, least_use: float) -> GpuReading:
    """Read a GPU, which counts as used above a utilization of `least_use`."""
    return GpuReading(
        used=nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 100 * least_use,
        reasons=int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        link=(
            int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        ),
    )


def read_max_link(nvml: ModuleType | Any, handle: object) -> tuple[int, int]:
    """Return the largest PCIe generation and width possible for GPU and slot."""
    return (
        int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    )


def _query(nvml: ModuleType | Any, function: Callable[..., T], *args: Any) -> T | None:
    try:
        return function(*args)
    except nvml.NVMLError:  # most often unsupported by this GPU
        return None
