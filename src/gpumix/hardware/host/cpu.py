"""Instruction support of the host CPU, and the cores available to this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gpumix.hardware.host.cgroups import read_core_quotas
from gpumix.schema.files import read_log

_CPUINFO_FILE = Path("/proc/cpuinfo")
_PRESSURE = Path("/proc/pressure/cpu")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's


def count_cores() -> float:
    """Return the cores available to this process, by affinity and cgroup quotas."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    count = count or float(os.cpu_count() or 1)
    return min([count, *read_core_quotas()])


def get_threads_per_rank(ranks: int) -> int:
    """Return the compute threads per rank for `ranks` ranks sharing this process's cores."""
    return max(1, int(count_cores() // max(1, ranks)))


def has_bf16() -> bool:
    """Return True if the CPU multiplies in bf16; False if unknown."""
    with suppress(OSError):
        return has_bf16_flag(read_log(_CPUINFO_FILE))
    return False


def read_core_pressure_s() -> float:
    """Return the seconds since boot in which a process waited for a core; 0 if unknown."""
    with suppress(OSError, ValueError):
        return parse_pressure_s(read_log(_PRESSURE))
    return 0.0


def parse_pressure_s(text: str) -> float:
    """Parse the waiting seconds from the kernel's pressure file."""
    some = next((line for line in text.splitlines() if line.startswith("some ")), "total=0")
    return int(some.rpartition("total=")[2]) / 1e6


def has_bf16_flag(text: str) -> bool:
    """Find bf16 support in the kernel's processor information."""
    for line in text.splitlines():
        name, _, told = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BF16.isdisjoint(told.split())
    return False
