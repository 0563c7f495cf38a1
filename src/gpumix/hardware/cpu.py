"""What the CPU of this host has instructions for, and how much of it this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gpumix.hardware.control_groups import core_quotas
from gpumix.spec.files import read_log

_ABOUT = Path("/proc/cpuinfo")
_PRESSURE = Path("/proc/pressure/cpu")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is of ARM's


def cores_here() -> float:
    """Cores that this process may use: its affinity, and the quotas of its groups."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    count = count or float(os.cpu_count() or 1)
    return min([count, *core_quotas()])


def threads_of(ranks: int) -> int:
    """How many threads each of so many ranks that share the cores of this process computes with."""
    return max(1, int(cores_here() // max(1, ranks)))


def cpu_has_bf16() -> bool:
    """Whether it multiplies in bf16; also False where nobody tells."""
    with suppress(OSError):
        return bf16_in(read_log(_ABOUT))
    return False


def short_of_cores_s() -> float:
    """Seconds in which some process had to wait for a core, since the system began; 0 where nobody
    tells."""
    with suppress(OSError, ValueError):
        return waited_s_in(read_log(_PRESSURE))
    return 0.0


def waited_s_in(text: str) -> float:
    """Of the kernel's account of waits."""
    some = next((line for line in text.splitlines() if line.startswith("some ")), "total=0")
    return int(some.rpartition("total=")[2]) / 1e6


def bf16_in(text: str) -> bool:
    """Of the kernel's account of its processors."""
    for line in text.splitlines():
        name, _, told = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BF16.isdisjoint(told.split())
    return False
