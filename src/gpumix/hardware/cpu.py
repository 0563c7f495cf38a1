"""What the CPU of this host has instructions for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ABOUT = Path("/proc/cpuinfo")
_PRESSURE = Path("/proc/pressure/cpu")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is of ARM's


def cpu_has_bf16() -> bool:
    """Whether it multiplies in bf16; also False where nobody tells."""
    with suppress(OSError):
        return bf16_in(_ABOUT.read_text(encoding="utf-8", errors="replace"))
    return False


def short_of_cores_s() -> float:
    """Seconds in which some process had to wait for a core, since the system began; 0 where nobody
    tells."""
    with suppress(OSError, ValueError):
        return waited_s_in(_PRESSURE.read_text(encoding="ascii"))
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
