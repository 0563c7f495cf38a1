"""Health of AMD GPUs as reported by the driver through ROCm's `amdsmi`: memory, errors, processes.
Values not reported by a GPU or driver are None; without the library nothing is known."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, TypeVar

from gpumix.hardware.discovery.gpu_health import GpuHealth

T = TypeVar("T")
_MIB = 2**20  # unit of `amdsmi_get_gpu_vram_usage`


@contextmanager
def open_amdsmi() -> Iterator[ModuleType | None]:
    """Initialize `amdsmi`; yield None if it is not installed or the driver does not answer."""
    try:
        import amdsmi
    except (ImportError, OSError, KeyError):  # importing amdsmi looks for its C library
        yield None
        return
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        yield None
        return
    try:
        yield amdsmi
    finally:
        with suppress(amdsmi.AmdSmiException):
            amdsmi.amdsmi_shut_down()


def find_amd_handle(smi: ModuleType | Any, device_id: str, ordinal: int) -> Any:
    """Return the GPU with torch's UUID, otherwise the GPU with HIP's number, otherwise None."""
    wanted = _hip_uuid(device_id)
    numbered = {}
    for handle in _query(smi, smi.amdsmi_get_processor_handles) or ():
        told = _query(smi, smi.amdsmi_get_gpu_enumeration_info, handle) or {}
        if wanted and str(told.get("hip_uuid", "")).lower() == wanted:
            return handle
        numbered[told.get("hip_id")] = handle
    return numbered.get(ordinal)


def read_amd_health(smi: ModuleType | Any, handle: Any, index: int) -> GpuHealth:
    """Return the driver's report on a GPU not used by this process.

    Args:
        index: number of the GPU in `rocm-smi`.
    """

    def ask(function: Callable[..., T], *args: Any) -> T | None:
        return _query(smi, function, handle, *args)

    memory = smi.amdsmi_get_gpu_vram_usage(handle)
    errors = ask(smi.amdsmi_get_gpu_total_ecc_count)
    pages = ask(smi.amdsmi_get_gpu_bad_page_info)
    cap = ask(smi.amdsmi_get_power_cap_info) or {}
    watts = [_number(cap.get(key)) for key in ("power_cap", "default_power_cap")]
    return GpuHealth(
        index=index,
        memory_bytes=int(memory["vram_total"]) * _MIB,
        used_bytes=int(memory["vram_used"]) * _MIB,
        uncorrected=None if errors is None else int(errors["uncorrectable_count"]),
        pages_pending=_is_pending(pages),
        others=tuple(
            (int(process["pid"]), _number(process.get("memory_usage", {}).get("vram_mem")) or 0)
            for process in ask(smi.amdsmi_get_gpu_process_list) or ()
            if int(process["pid"]) != os.getpid()
        ),
        power_watts=(watts[0] / 1e6, watts[1] / 1e6) if watts[0] and watts[1] else None,
    )


def _is_pending(pages: object) -> bool | None:
    """Return True if bad memory pages wait for retirement; some versions report "none" as text."""
    if not isinstance(pages, list):
        return None if pages is None else False
    return any("PENDING" in str(page.get("status", "")).upper() for page in pages)


def _hip_uuid(device_id: str) -> str:
    """Convert a UUID to HIP's form: "gpu-" and 16 digits, the bytes of the UUID."""
    with suppress(ValueError, UnicodeDecodeError):
        return "gpu-" + uuid.UUID(device_id.removeprefix("GPU-")).bytes.decode("ascii").lower()
    return ""


def _number(value: object) -> int | None:
    """Return an integer, or None: the library reports missing values as "N/A"."""
    return int(value) if isinstance(value, int | float) else None


def _query(smi: ModuleType | Any, function: Callable[..., T], *args: Any) -> T | None:
    try:
        return function(*args)
    except smi.AmdSmiException:  # most often unsupported by this GPU
        return None
