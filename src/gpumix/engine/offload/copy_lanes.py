"""Copy streams between a device and the host, overlapping with compute.

Rules of memory access:

* Work on a *lane* starts after all work submitted earlier to the compute stream. So a copy finds
its input, and overwrites nothing that is still in use.
* Device memory written or still read by a lane may be used by the compute stream after the lane's
mark, which blocks the stream, not the host.
* Host memory read by a lane may be written once its mark is reached, and host memory written by it
may be read; the host, or a thread of it, waits for the mark.
* Buffers used by a lane live as long as the engine; other tensors are registered with torch's
allocator (`uses`). Pinned pages are freed after all copies (`hardware.host.pinned`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gpumix.hardware import runtime
from gpumix.hardware.device import device_in_use
from gpumix.schema.plan.stage import Place

if TYPE_CHECKING:
    from gpumix.hardware.emulation.link import LinkArrival


class LaneMark:
    """Event after the work submitted to a lane so far; without a stream, work is already done,
    and an emulated link says when it counts as done."""

    def __init__(
        self,
        device: torch.device,
        event: runtime.Event | None,
        arrival: LinkArrival | None = None,
    ) -> None:
        self._device = device
        self._event = event
        self.arrival = arrival

    def block_current_stream(self) -> None:
        """Make the current stream wait for the event; the host continues."""
        if self._event is not None:
            runtime.current_stream(self._device).wait_event(self._event)
        elif self.arrival is not None:
            self.arrival.wait()

    def wait(self) -> None:
        """Make the host wait for the event."""
        if self._event is not None:
            self._event.synchronize()
        elif self.arrival is not None:
            self.arrival.wait()


class CopyLane:
    """Stream of copies in one direction. On a device that is no GPU, work is done at once.

    Args:
        towards: direction of the copies; needed only where a link is emulated.
    """

    def __init__(self, device: torch.device, towards: Place = "host") -> None:
        self._device = device
        self._stream = runtime.new_stream(device) if runtime.is_gpu(device) else None
        opened = device_in_use()
        link = None if opened is None else opened.host_link
        self._link = None if link is None else link.towards(towards)

    @property
    def is_stream(self) -> bool:
        return self._stream is not None

    @contextmanager
    def active(self, *, at_once: bool = False) -> Iterator[None]:
        """Make the lane's stream current in the body.

        Args:
            at_once: do not wait for the compute stream, because its results are not read.
        """
        if self._stream is not None and not at_once:
            current = runtime.current_stream(self._device)
            if current != self._stream:
                self._stream.wait_stream(current)
        with runtime.on_stream(self._stream):
            yield

    def uses(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep the memory of `tensor` from reuse until the lane's work so far is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor

    def carry(self, size_bytes: int) -> LaneMark:
        """Start a copy of `size_bytes` on an emulated link, and return a mark at its end. On other
        devices copies take their own time, and the mark is reached."""
        arrival = None if self._link is None else self._link.carry(size_bytes)
        return LaneMark(self._device, None, arrival)

    def mark(self) -> LaneMark:
        """Return a mark after all work submitted to the lane so far."""
        if self._stream is None:
            arrival = None if self._link is None else self._link.last
            return LaneMark(self._device, None, arrival)
        event = runtime.new_event(self._device)
        event.record(self._stream)
        return LaneMark(self._device, event)
