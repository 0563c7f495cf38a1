"""What the CPU of this host has instructions for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ABOUT = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is of ARM's


def cpu_has_bf16() -> bool:
    """Whether it multiplies in bf16; also False where nobody tells."""
    with suppress(OSError):
        return bf16_in(_ABOUT.read_text(encoding="utf-8", errors="replace"))
    return False


def bf16_in(text: str) -> bool:
    """Of the kernel's account of its processors."""
    for line in text.splitlines():
        name, _, told = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _BF16.isdisjoint(told.split())
    return False
