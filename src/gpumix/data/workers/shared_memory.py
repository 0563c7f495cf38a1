"""Shared memory for batches: slots lent by a process to itself and to its forked workers.

Anonymous shared memory needs no space in /dev/shm, which containers keep small, exists only where
written, and ends with its processes. A lent slot returns when its last tensor is collected.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor

from gpumix.schema.errors import MachineError
from gpumix.schema.units import show_bytes

_PAGE_BYTES = mmap.PAGESIZE
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; not every Python has the name


class Arena:
    """A pool of `slots` slots of `slot_bytes` bytes; fewer if the system limits shared memory.

    Raises:
        MachineError: not even a single slot can be shared.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = max(1, -(-slot_bytes // _PAGE_BYTES)) * _PAGE_BYTES
        self._memory = _map_shared(slots, self.slot_bytes)
        # Last in, first out, so slots never needed are never touched.
        self._free = list(range(len(self._memory) // self.slot_bytes))[::-1]
        # Reentrant: garbage collection in a thread that has the lock may return a slot.
        self._lock = threading.RLock()

    def take(self) -> int | None:
        """Return a free slot, or None."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def buffer(self, slot: int, nbytes: int) -> Tensor:
        """Return the first bytes of a slot: uint8[nbytes]."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._view(slot, nbytes), dtype=torch.uint8)

    def lend(self, slot: int, nbytes: int) -> Tensor:
        """Return the first bytes of a slot, uint8[nbytes]; free the slot when no tensor uses it any
        more."""
        if not nbytes:
            self.give_back(slot)
            return torch.empty(0, dtype=torch.uint8)
        view = self._view(slot, nbytes)
        weakref.finalize(view, self.give_back, slot).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _view(self, slot: int, nbytes: int) -> memoryview:
        if nbytes > self.slot_bytes:
            raise ValueError(f"{nbytes} bytes do not fit into a slot of {self.slot_bytes}")
        begin = slot * self.slot_bytes
        return memoryview(self._memory)[begin : begin + nbytes]


def _map_shared(slots: int, slot_bytes: int) -> mmap.mmap:
    """Map shared memory, halving the slots while a process limit or the system refuses."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        return mmap.mmap(-1, slots * slot_bytes, flags=flags)
    except OSError as error:
        if slots > 1:
            return _map_shared(slots // 2, slot_bytes)
        raise MachineError(
            f"{show_bytes(slot_bytes)} of memory for a batch cannot be shared with data workers",
            code="worker-memory-not-shared",
            why=error.strerror or str(error),
            fix="free memory, raise `ulimit -v`, or fetch in a thread: `data: {num_workers: 0}`",
        ) from error
