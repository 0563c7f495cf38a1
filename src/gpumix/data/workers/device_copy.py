"""Asynchronous copies of batches to a device, overlapped with the previous step.

The thread that launches work does not wait: the copy runs on a stream of its own, and the compute
stream waits for its event. Memory on either side is reused only after its last reader: see
`InFlightBatches` and `CopyStream`.
"""

from __future__ import annotations

from collections import deque

import torch

from gpumix.data.workers.batch_layout import Batch
from gpumix.data.workers.padding import MASK, PER_TOKEN_KEYS
from gpumix.hardware import runtime


class CopyStream:
    """A side stream for copies to a GPU. An event marks the end of a batch's copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = runtime.new_stream(device)

    def send(self, batch: Batch) -> tuple[Batch, runtime.Event]:
        """Start the copy: return the batch on the device, not to be touched before its event."""
        # Allocated on this stream, the memory has no pending work of other streams.
        with runtime.on_stream(self._stream):
            there = {key: t.to(self._device, non_blocking=True) for key, t in batch.items()}
            sent = runtime.record_event(self._device)
        return there, sent

    def receive(self, batch: Batch, sent: runtime.Event) -> None:
        """Order later computation after the event, and keep the memory of `batch` from reuse until
        the computation is done."""
        computes = runtime.current_stream(self._device)
        computes.wait_event(sent)
        for tensor in batch.values():
            tensor.record_stream(computes)

    def arrived(self, sent: runtime.Event) -> bool:
        return sent.query()


class InFlightBatches:
    """Batches in flight to a device.

    The source of a copy is kept until its event, since freed pinned memory may get the next batch
    at once. Token batches with a mask stay on the host: they are small, and the engine looks at
    their masks before it copies all but the padding.
    """

    def __init__(self, way: CopyStream) -> None:
        self._way = way
        self._coming: dict[int, tuple[Batch, runtime.Event]] = {}
        self._read: deque[tuple[Batch, runtime.Event]] = deque()  # sources of copies, oldest first

    def begin(self, position: int, batch: Batch) -> None:
        """Start copying the batch at `position` of the order, unless device memory is short."""
        if position in self._coming or _is_trimmed_on_host(batch):
            return
        try:
            self._send(position, batch)
        except torch.OutOfMemoryError:
            return  # `take` copies it, once the current step has freed memory

    def take(self, position: int, batch: Batch) -> Batch:
        """Return the batch on the device, ready for later computation."""
        if _is_trimmed_on_host(batch):
            return batch
        if position not in self._coming:
            self._send(position, batch)
        there, sent = self._coming.pop(position)
        self._way.receive(there, sent)
        return there

    def forget(self) -> None:
        """Drop batches in flight that were not taken."""
        self._coming.clear()

    def _send(self, position: int, batch: Batch) -> None:
        while self._read and self._way.arrived(self._read[0][1]):
            self._read.popleft()
        there, sent = self._way.send(batch)
        self._read.append((batch, sent))
        self._coming[position] = there, sent


def find_pin_memory_device(device: torch.device | str) -> torch.device | None:
    """Return the GPU whose copies need pinned memory, or None for any device but a GPU."""
    if not runtime.is_gpu(device) or not runtime.is_available():
        return None
    # Resolved now: the pinning thread has another current device.
    return runtime.add_device_index(device)


def pin_batch(batch: Batch, pin: torch.device | None) -> Batch:
    """Return the batch in pinned memory for the GPU `pin`, if any. Pinning uses the thread's
    current device; otherwise every rank would open a context on device 0."""
    if pin is None:
        return batch
    with runtime.on_device(pin):
        return {k: v if v.is_pinned() else v.pin_memory() for k, v in batch.items()}


def _is_trimmed_on_host(batch: Batch) -> bool:
    """Return whether the engine trims padding from the batch, which it locates on the host only."""
    return MASK in batch and batch.keys() <= set(PER_TOKEN_KEYS)
