"""Streams for copies between a device and its host, which overlap with computing.

Who may use which memory when:

* Work on a *lane* begins behind all that the computing stream has been given before. So a copy
  finds what it reads, and overwrites nothing that is still computed with.
* What a lane has written on the device, or still reads there, is for the computing stream behind
  the lane's mark: that holds back the stream, not the host.
* What a lane reads on the host may be written to when its mark is reached, what it has written
  there may be read: for that the host waits, or a thread of it.
* What a lane uses lies in buffers that live as long as the engine; of any other tensor torch's
  allocator is told (`uses`). Pinned pages are given back behind all copies (`hardware.pinned`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpumix.hardware import runtime


class Mark:
    """The end of what a lane had been given when the mark was made; without a stream, now."""

    def __init__(self, device: torch.device, event: runtime.Event | None) -> None:
        self._device = device
        self._event = event

    def hold_back(self) -> None:
        """Let the current stream wait for it; the host goes on."""
        if self._event is not None:
            runtime.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """Let the host wait for it."""
        if self._event is not None:
            self._event.synchronize()


class Lane:
    """Copies in one direction. Where the device is no GPU, work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = runtime.new_stream(device) if runtime.is_gpu(device) else None

    @property
    def is_stream(self) -> bool:
        return self._stream is not None

    @contextmanager
    def active(self, *, at_once: bool = False) -> Iterator[None]:
        """Inside, the lane's stream is the current one.

        Args:
            at_once: it begins whatever the computing stream does: it reads nothing of its work.
        """
        if self._stream is not None and not at_once:
            current = runtime.current_stream(self._device)
            if current != self._stream:
                self._stream.wait_stream(current)
        with runtime.on_stream(self._stream):
            yield

    def uses(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whoever drops `tensor`, its memory is used again behind what the lane has been given."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor

    def mark(self) -> Mark:
        """Of all that the lane has been given so far."""
        if self._stream is None:
            return Mark(self._device, None)
        event = runtime.new_event(self._device)
        event.record(self._stream)
        return Mark(self._device, event)
