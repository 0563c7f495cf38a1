"""Brings batches to a device while it computes the one before.

Who gives work to the device asks for a batch and goes on: the copy runs on a stream of its own, and
the stream that computes waits for its event, the host for nothing. Memory on either side is used
again only behind what still reads it: see `Copies` and `CopyStream`.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

import torch

from gpumix.data.layout import Batch
from gpumix.data.ragged import MASK, PER_TOKEN
from gpumix.hardware import runtime

E = TypeVar("E")


class Way(Protocol[E]):
    """To a device, beside what it computes. An event is the end of one batch's copy."""

    def send(self, batch: Batch) -> tuple[Batch, E]:
        """Begin to copy: the batch on the device, not to be touched before its event."""
        ...

    def receive(self, batch: Batch, sent: E) -> None:
        """What is computed from here on comes behind the event, and memory of `batch` is not used
        again before that is computed."""
        ...

    def arrived(self, sent: E) -> bool:
        """Whether the copy has ended, without waiting for it."""
        ...


class CopyStream:
    """A stream of copies to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = runtime.new_stream(device)

    def send(self, batch: Batch) -> tuple[Batch, runtime.Event]:
        # Made on this stream, the memory belongs to it: nothing of others can be under way in it.
        with runtime.on_stream(self._stream):
            there = {key: t.to(self._device, non_blocking=True) for key, t in batch.items()}
            sent = runtime.recorded_event(self._device)
        return there, sent

    def receive(self, batch: Batch, sent: runtime.Event) -> None:
        computes = runtime.current_stream(self._device)
        computes.wait_event(sent)
        for tensor in batch.values():
            tensor.record_stream(computes)

    def arrived(self, sent: runtime.Event) -> bool:
        return sent.query()


class Copies(Generic[E]):
    """Batches on their way to a device.

    What a batch is copied from is held until its event: pinned memory that is let go may get the
    next batch at once. Batches of tokens with a mask stay where they are, for they are small, and
    the engine looks at their masks before it copies what is not padding.
    """

    def __init__(self, way: Way[E]) -> None:
        self._way = way
        self._coming: dict[int, tuple[Batch, E]] = {}
        self._read: deque[tuple[Batch, E]] = deque()  # what is copied from, oldest first

    def begin(self, position: int, batch: Batch) -> None:
        """Have the batch at `position` of the order on its way, unless there is no room yet."""
        if position in self._coming or _looked_at(batch):
            return
        try:
            self._send(position, batch)
        except torch.OutOfMemoryError:
            return  # it has its turn when the step that computes now has given memory back

    def take(self, position: int, batch: Batch) -> Batch:
        """The batch, on the device for what is computed from here on."""
        if _looked_at(batch):
            return batch
        if position not in self._coming:
            self._send(position, batch)
        there, sent = self._coming.pop(position)
        self._way.receive(there, sent)
        return there

    def forget(self) -> None:
        """What is on its way and was not taken."""
        self._coming.clear()

    def _send(self, position: int, batch: Batch) -> None:
        while self._read and self._way.arrived(self._read[0][1]):
            self._read.popleft()
        there, sent = self._way.send(batch)
        self._read.append((batch, sent))
        self._coming[position] = there, sent


def _looked_at(batch: Batch) -> bool:
    """Whether the engine cuts padding off it, which it finds on the host alone."""
    return MASK in batch and batch.keys() <= set(PER_TOKEN)
