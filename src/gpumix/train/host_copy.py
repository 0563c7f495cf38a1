"""A copy of what a rank saves, in the host's memory: it trains on while the copy is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpumix.cost.slots import aligned
from gpumix.hardware import runtime
from gpumix.hardware.environment import COPIES_PART, available_host_bytes
from gpumix.hardware.memory import host_memory
from gpumix.hardware.pinned import pinned_memory
from gpumix.spec.units import show_bytes
from gpumix.train.checkpoint_shards import Boxed, Index, StoredBox, StoredTensor

# Tensors by nested names, as they are saved.
Tensors = Mapping[str, Any]


class HostCopy:
    """Room for a copy of `tensors`, in one piece of memory; `boxed` are the same names in it.

    Args:
        pinned: for tensors of a GPU, whose copies are faster then.
        memory: where the copy goes, `size_of(tensors)` bytes; default: memory of its own.
    """

    def __init__(
        self, tensors: Tensors, *, pinned: bool, memory: torch.Tensor | None = None
    ) -> None:
        self._form = _form(tensors)
        self._places: list[torch.Tensor] = []
        if memory is None and pinned:
            memory = pinned_memory(size_of(tensors))
        elif memory is None:
            with host_memory():
                memory = torch.empty(size_of(tensors), dtype=torch.uint8)
        pieces = memory.split([aligned(view.nbytes) for view in _views(tensors)])
        self.boxed = self._in(iter(pieces), tensors)

    def _in(self, pieces: Iterator[torch.Tensor], tensors: Tensors) -> dict[str, Any]:
        """The names of `tensors`, with a piece of memory for each box."""
        found: dict[str, Any] = {}
        for name, value in tensors.items():
            if isinstance(value, Boxed):
                views = {o: self._place(next(pieces), view) for o, view in value.views.items()}
                found[name] = Boxed(value.shape, views)
            else:
                found[name] = self._in(pieces, value)
        return found

    def _place(self, piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        place = piece[: like.nbytes].view(like.dtype).view(like.shape)
        self._places.append(place)
        return place

    def fits(self, tensors: Tensors) -> bool:
        """Whether these have the names, shapes and dtypes that there is room for."""
        return _form(tensors) == self._form

    def fill(self, tensors: Tensors, stream: runtime.Stream | None = None) -> None:
        """Copy them; on a GPU on this stream, for the end of which the calling thread waits."""
        values = list(_views(tensors))
        if not values:
            return
        with runtime.on_stream(stream), torch.no_grad():
            torch._foreach_copy_(self._places, values, non_blocking=stream is not None)
            if stream is not None:
                stream.synchronize()


def index_of(tensors: Tensors, file: str) -> Index:
    """Where the boxes of `tensors` are in the memory of a `HostCopy`, told as of a file."""
    stored: dict[str, StoredTensor] = {}
    begin = 0
    for name, boxed in _named(tensors):
        boxes = []
        for offset, view in boxed.views.items():
            box = StoredBox(
                offset=offset, size=view.shape, file=file, start=begin, length=view.nbytes
            )
            boxes.append(box)
            begin += aligned(view.nbytes)
        dtype = next((str(v.dtype).removeprefix("torch.") for v in boxed.views.values()), "float32")
        stored[name] = StoredTensor(dtype=dtype, shape=boxed.shape, boxes=tuple(boxes))
    return Index(tensors=stored)


def _named(tensors: Tensors, prefix: str = "") -> Iterator[tuple[str, Boxed]]:
    for name, value in tensors.items():
        if isinstance(value, Boxed):
            yield f"{prefix}{name}", value
        else:
            yield from _named(value, f"{prefix}{name}.")


def size_of(tensors: Tensors) -> int:
    """Bytes that a copy takes."""
    return sum(aligned(view.nbytes) for view in _views(tensors))


def room_for(size: int, ranks: int) -> bool:
    """Whether the host has memory for copies of `size` bytes of each of so many ranks."""
    return size * ranks <= COPIES_PART * available_host_bytes()


def no_room(copies: int, size: int, ranks: int) -> str:
    """That the host has none for so many copies of `size` bytes of each of so many ranks."""
    what = "a copy" if copies == 1 else f"{copies} copies"
    return f"the host has no memory for {what} of {show_bytes(size)} for each of {ranks} ranks"


def _views(tensors: Tensors) -> Iterator[torch.Tensor]:
    for value in tensors.values():
        yield from value.views.values() if isinstance(value, Boxed) else _views(value)


def _form(tensors: Tensors) -> tuple[Any, ...]:
    return tuple(
        (
            name,
            _form(value)
            if not isinstance(value, Boxed)
            else (value.shape, *((o, v.shape, v.dtype) for o, v in value.views.items())),
        )
        for name, value in tensors.items()
    )
