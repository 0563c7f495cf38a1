"""Counting and capping of a CPU process's allocations, to the byte, like on a GPU.

The allocator of a process can be replaced only once, so `limit_memory` installs it on the first
call and later changes the cap. Used by emulated devices and, to measure peaks, by plain CPUs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpumix.hardware.memory_limit.build_allocator import BuildError, build_capped_allocator
from gpumix.schema import files

_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for the workspace
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # from NCCL
)


# Messages of CUDA's allocator when out of memory.
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryLimit(ABC):
    """The memory limit of this process. Only allocations after the installation count.

    Attributes:
        exact: True if bytes are counted. Otherwise no cap is enforced, and `current_bytes` and
            `peak_bytes` are None rather than a guess.
        why_inexact: reason why bytes cannot be counted here; empty if counted.
    """

    exact: bool
    why_inexact: str = ""

    @abstractmethod
    def set_cap(self, cap_bytes: int | None, *, owner: str) -> None:
        """Refuse allocations beyond `cap_bytes`; None lifts the cap. `owner` is named in errors."""

    @property
    @abstractmethod
    def current_bytes(self) -> int | None:
        """Bytes in use, or None if unknown."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Peak bytes in use since `reset_peak`, or None if unknown."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset the peak to the bytes in use now; no effect if peaks are unknown."""


def limit_memory(cap_bytes: int | None, *, owner: str = "this process") -> MemoryLimit:
    """Count this process's CPU tensors, and refuse allocations beyond `cap_bytes`.

    Args:
        cap_bytes: limit of all tensors allocated after the first call in this process; None only
            counts.
        owner: name in out-of-memory errors: "emulated device 'small'".
    """
    limit = _get_process_limit()
    limit.set_cap(cap_bytes, owner=owner)
    return limit


@contextmanager
def count_as_host_memory() -> Iterator[None]:
    """Attribute this thread's allocations to the host. If CPU tensors emulate a device's,
    allocations inside count neither against the device's memory nor as used."""
    limit = _get_process_limit() if _get_process_limit.cache_info().currsize else None
    if not isinstance(limit, _CountedLimit):
        yield
        return
    before = limit.set_on_host(on_host=True)
    try:
        yield
    finally:
        limit.set_on_host(on_host=before)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` means exhausted device memory, in any wording.

    MemoryError counts: with a system limit on memory, Python's own objects fail the same way.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _OUT_OF_MEMORY_TEXTS)


def is_fragmented(error: BaseException) -> bool:
    """Return True if CUDA's allocator had enough free memory, but in pieces, according to
    `error`."""
    asked, idle = (_parse_bytes(str(error), text) for text in (_ASKED, _UNALLOCATED))
    return asked is not None and idle is not None and idle >= asked


def _parse_bytes(text: str, pattern: re.Pattern[str]) -> float | None:
    found = pattern.search(text)
    return None if found is None else float(found[1]) * _UNITS[found[2]]


@functools.cache
def _get_process_limit() -> MemoryLimit:
    limit: MemoryLimit
    try:
        limit = _CountedLimit(build_capped_allocator())
    except BuildError as error:
        limit = _UncountedLimit(why=str(error))
    # A forked child, such as a data loader's worker, is not the device.
    os.register_at_fork(after_in_child=lambda: limit.set_cap(None, owner="forked process"))
    return limit


class _CountedLimit(MemoryLimit):
    """The allocator of `capped_alloc.cpp`: byte-exact, raises torch.OutOfMemoryError."""

    exact = True

    def __init__(self, library: Path) -> None:
        try:
            with files.open_trusted(library) as descriptor:
                self._library = ctypes.CDLL(files.make_descriptor_path(descriptor, library))
        except OSError as error:
            raise BuildError(f"cannot load {library}: {error}") from error
        self._library.gpumix_set_cap.argtypes = (ctypes.c_int64, ctypes.c_char_p)
        self._library.gpumix_current.restype = ctypes.c_int64
        self._library.gpumix_peak.restype = ctypes.c_int64
        self._library.gpumix_set_on_host.argtypes = (ctypes.c_bool,)
        self._library.gpumix_set_on_host.restype = ctypes.c_bool
        self._library.gpumix_install()

    def set_cap(self, cap_bytes: int | None, *, owner: str) -> None:
        cap = -1 if cap_bytes is None else cap_bytes
        self._library.gpumix_set_cap(cap, owner.encode())

    def set_on_host(self, *, on_host: bool) -> bool:
        """Turn counting of this thread's allocations off or on; return the previous state."""
        return bool(self._library.gpumix_set_on_host(on_host))

    @property
    def current_bytes(self) -> int:
        return int(self._library.gpumix_current())

    @property
    def peak_bytes(self) -> int:
        return int(self._library.gpumix_peak())

    def reset_peak(self) -> None:
        self._library.gpumix_reset_peak()


class _UncountedLimit(MemoryLimit):
    """No counting and no cap. A system limit would also restrict threads and Python's own objects,
    and kill the process unpredictably."""

    exact = False
    current_bytes = None
    peak_bytes = None

    def __init__(self, *, why: str) -> None:
        self.why_inexact = why

    def set_cap(self, cap_bytes: int | None, *, owner: str) -> None:
        return None

    def reset_peak(self) -> None:
        return None
