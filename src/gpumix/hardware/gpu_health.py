"""How NVIDIA's GPUs are, as their driver says: errors, throttling, links, who uses them.

Asks NVML, so neither torch nor a CUDA context is needed. What a card or driver does not tell is
None.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from gpumix.spec.base import Value

T = TypeVar("T")

# Bits of NVML's clocks event reasons; being idle, and clocks that a user set, are none.
REASONS = {
    0x04: "it reaches its power limit",
    0x08: "its hardware slows it down",
    0x20: "it is too warm",
    0x40: "it is far too warm",
    0x80: "an external power brake slows it down",
}
_UNCORRECTED, _SINCE_START = 1, 0  # NVML's numbers for kinds of memory errors
_PROHIBITED = 2  # NVML's compute mode in which nobody gets a context


@dataclass(frozen=True)
class Look:
    """One look at a GPU.

    Attributes:
        used: whether it computes.
        reasons: NVML's bits for what holds its clocks down.
        link: generation and width of its PCIe link now.
    """

    used: bool
    reasons: int
    link: tuple[int, int]


class GpuHealth(Value):
    """One GPU at rest.

    Attributes:
        index: its number, as `nvidia-smi` has it.
        most_link: generation and width that its PCIe link could have in its slot.
        uncorrected: memory errors that could not be corrected, since the driver started.
        pages_pending: whether memory that failed is taken out of use at the next restart.
        remap_failed: whether there is no memory left to take its place.
        others: processes that use it, and the bytes of each; 0 if they are not told.
        power_watts: its limit, and the limit that it came with.
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
def driver() -> Iterator[ModuleType | None]:
    """NVML in here; None where there is no driver, or it does not answer."""
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
    """The driver's, and that of the newest CUDA which it knows ("12.4"); empty without one."""
    with driver() as nvml:
        if nvml is None:
            return "", ""
        version = _told(nvml, nvml.nvmlSystemGetDriverVersion) or ""
        return version.decode() if isinstance(version, bytes) else str(version), newest_cuda(nvml)


def newest_cuda(nvml: ModuleType | Any) -> str:
    """The newest CUDA that the driver knows, such as "12.4"; empty if it does not say."""
    cuda = _told(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""


def handle_of(nvml: ModuleType | Any, uuid: str, index: int) -> Any:
    """The GPU with this UUID; the one of this number where the UUID is none."""
    if uuid.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    return nvml.nvmlDeviceGetHandleByIndex(index)


def health(nvml: ModuleType | Any, handle: Any) -> GpuHealth:
    """What the driver says of a GPU that this process does not use."""

    def ask(function: Callable[..., T], *args: Any) -> T | None:
        return _told(nvml, function, handle, *args)

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
        most_link=_told(nvml, most_link, nvml, handle),
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


def look(nvml: ModuleType | Any, handle: object, least_use: float) -> Look:
    """One look; it computes if it does so in more than `least_use` of the time."""
    return Look(
        used=nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 100 * least_use,
        reasons=int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        link=(
            int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        ),
    )


def most_link(nvml: ModuleType | Any, handle: object) -> tuple[int, int]:
    """Generation and width of the PCIe link that card and slot could have."""
    return (
        int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    )


def _told(nvml: ModuleType | Any, function: Callable[..., T], *args: Any) -> T | None:
    try:
        return function(*args)
    except nvml.NVMLError:  # most often: this card has no such thing
        return None
