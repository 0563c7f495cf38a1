"""Copy of a rank's state in host memory: training continues while the copy is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpumix.cost.memory_layout.buffer_slots import align_size
from gpumix.hardware import runtime
from gpumix.hardware.host.environment import COPIES_PART, available_host_bytes
from gpumix.hardware.host.pinned import allocate_pinned
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.schema.units import show_bytes
from gpumix.train.checkpoint.dcp_storage import BoxedTensor, Index, StoredBox, StoredTensor

# Tensors by nested names, as saved.
Tensors = Mapping[str, Any]


class HostCopy:
    """Host memory for a copy of `tensors`, in a single block; `boxed` has equal names.

    Args:
        pinned: for tensors of a GPU, to copy faster.
        memory: destination, `count_bytes(tensors)` bytes; default: newly allocated.
    """

    def __init__(
        self, tensors: Tensors, *, pinned: bool, memory: torch.Tensor | None = None
    ) -> None:
        self._form = _describe_layout(tensors)
        self._places: list[torch.Tensor] = []
        if memory is None and pinned:
            memory = allocate_pinned(count_bytes(tensors))
        elif memory is None:
            with count_as_host_memory():
                memory = torch.empty(count_bytes(tensors), dtype=torch.uint8)
        pieces = memory.split([align_size(view.nbytes) for view in _views(tensors)])
        self.boxed = self._in(iter(pieces), tensors)

    def _in(self, pieces: Iterator[torch.Tensor], tensors: Tensors) -> dict[str, Any]:
        """Return the names of `tensors` with a piece of memory for each box."""
        found: dict[str, Any] = {}
        for name, value in tensors.items():
            if isinstance(value, BoxedTensor):
                views = {o: self._place(next(pieces), view) for o, view in value.views.items()}
                found[name] = BoxedTensor(value.shape, views)
            else:
                found[name] = self._in(pieces, value)
        return found

    def _place(self, piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        place = piece[: like.nbytes].view(like.dtype).view(like.shape)
        self._places.append(place)
        return place

    def fits(self, tensors: Tensors) -> bool:
        """Return whether names, shapes and dtypes of `tensors` match the allocated memory."""
        return _describe_layout(tensors) == self._form

    def fill(self, tensors: Tensors, stream: runtime.Stream | None = None) -> None:
        """Copy `tensors`; on a GPU on `stream`, and wait for the end."""
        values = list(_views(tensors))
        if not values:
            return
        with runtime.on_stream(stream), torch.no_grad():
            torch._foreach_copy_(self._places, values, non_blocking=stream is not None)
            if stream is not None:
                stream.synchronize()


def make_index(tensors: Tensors, file: str) -> Index:
    """Return the index of the boxes of `tensors` in the memory of a `HostCopy`, described like a
    file."""
    stored: dict[str, StoredTensor] = {}
    begin = 0
    for name, boxed in _iterate_boxed(tensors):
        boxes = []
        for offset, view in boxed.views.items():
            box = StoredBox(
                offset=offset, size=view.shape, file=file, start=begin, length=view.nbytes
            )
            boxes.append(box)
            begin += align_size(view.nbytes)
        dtype = next((str(v.dtype).removeprefix("torch.") for v in boxed.views.values()), "float32")
        stored[name] = StoredTensor(dtype=dtype, shape=boxed.shape, boxes=tuple(boxes))
    return Index(tensors=stored)


def _iterate_boxed(tensors: Tensors, prefix: str = "") -> Iterator[tuple[str, BoxedTensor]]:
    for name, value in tensors.items():
        if isinstance(value, BoxedTensor):
            yield f"{prefix}{name}", value
        else:
            yield from _iterate_boxed(value, f"{prefix}{name}.")


def count_bytes(tensors: Tensors) -> int:
    """Return the bytes of a copy."""
    return sum(align_size(view.nbytes) for view in _views(tensors))


def has_room_for(size: int, ranks: int) -> bool:
    """Return whether the host has memory for a copy of `size` bytes for each of `ranks` ranks."""
    return size * ranks <= COPIES_PART * available_host_bytes()


def format_no_room(copies: int, size: int, ranks: int) -> str:
    """Return the message for missing host memory: `copies` copies of `size` bytes for each rank."""
    what = "a copy" if copies == 1 else f"{copies} copies"
    return f"the host has no memory for {what} of {show_bytes(size)} for each of {ranks} ranks"


def _views(tensors: Tensors) -> Iterator[torch.Tensor]:
    for value in tensors.values():
        yield from value.views.values() if isinstance(value, BoxedTensor) else _views(value)


def _describe_layout(tensors: Tensors) -> tuple[Any, ...]:
    return tuple(
        (
            name,
            _describe_layout(value)
            if not isinstance(value, BoxedTensor)
            else (value.shape, *((o, v.shape, v.dtype) for o, v in value.views.items())),
        )
        for name, value in tensors.items()
    )
