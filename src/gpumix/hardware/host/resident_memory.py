"""Resident memory of this process at its peak, as the kernel counts pages."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # of `clear_refs`


class PeakMemory:
    """Growth of this process's resident memory inside the context, at its peak.

    Pages of mapped files count while they are mapped. Where the kernel cannot forget an earlier
    peak, growth below that goes unseen.

    Attributes:
        grown_bytes: valid after the context.
    """

    grown_bytes = 0

    def __enter__(self) -> PeakMemory:
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        self._begin = _read("VmRSS") or read_peak_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.grown_bytes = max(0, read_peak_bytes() - self._begin)


def read_peak_bytes() -> int:
    """Return the peak since the process started, or since the last `PeakMemory` began."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _read("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _read(name: str) -> int:
    """Return an amount of the process's status; 0 where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith(f"{name}:")), "")
    return int(found.split()[1]) * 1024 if found else 0
