"""Host memory for tensors offloaded from a device.

Copies run in a separate lane (`engine.offload.copy_lanes`) and overlap with compute.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext

import torch

from gpumix.engine.offload.copy_lanes import CopyLane, LaneMark
from gpumix.hardware import runtime
from gpumix.hardware.host.pinned import allocate_pinned
from gpumix.hardware.memory_limit import count_as_host_memory


def allocate_on_host(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate uninitialized host memory, pinned if `device` is a GPU."""
    if runtime.is_gpu(device):
        return allocate_pinned(numel * dtype.itemsize).view(dtype)
    with count_as_host_memory():
        return torch.empty(numel, dtype=dtype)


class OffloadStore:
    """Offload store for tensors of `device`, with reused host memory.

    Args:
        clock: runs while the device waits for a copy.
    """

    def __init__(
        self, device: torch.device, clock: AbstractContextManager[None] | None = None
    ) -> None:
        self.device = device
        self.clock = nullcontext() if clock is None else clock
        self.lane = CopyLane(device)
        # Emulated links have a lane for each direction.
        self.back = self.lane if self.lane.is_stream else CopyLane(device, "device")
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def keep(self, tensor: torch.Tensor) -> OffloadedTensor:
        """Start to copy `tensor` to the host; the tensor may be dropped at once."""
        free = self._free[tensor.numel(), tensor.dtype]
        memory = free.pop() if free else allocate_on_host(tensor.numel(), tensor.dtype, self.device)
        on_host = memory.view(tensor.shape)
        self.lane.carry(tensor.nbytes)
        with self.lane.active() if self.lane.is_stream else self.clock:
            on_host.copy_(self.lane.uses(tensor), non_blocking=True)
        return OffloadedTensor(self, on_host, memory)

    def give_back(self, memory: torch.Tensor) -> None:
        self._free[memory.numel(), memory.dtype].append(memory)


class OffloadedTensor:
    """A tensor on the host, or on the way back to the device."""

    def __init__(self, store: OffloadStore, on_host: torch.Tensor, memory: torch.Tensor) -> None:
        self._store = store
        self._on_host = on_host
        self._memory = memory
        self._coming: torch.Tensor | None = None
        self._came: LaneMark | None = None

    def fetch(self) -> None:
        """Start to copy the tensor back, unless started."""
        if self._coming is None:
            lane = self._store.back
            lane.carry(self._on_host.nbytes)
            with lane.active(at_once=True):
                self._coming = self._on_host.to(self._store.device, non_blocking=True, copy=True)
            self._came = lane.mark()

    def reload(self) -> torch.Tensor:
        """Return the tensor for use on the current stream, and free the host memory for reuse."""
        with self._store.clock:
            self.fetch()
            assert self._coming is not None and self._came is not None
            self._came.block_current_stream()
            if self._store.lane.is_stream:
                self._coming.record_stream(runtime.current_stream(self._store.device))
        self._store.give_back(self._memory)
        return self._coming
