"""Window of a parameter: the part that a rank computes with. All of the parameter, or, in a
tensor-parallel group, runs along one dimension.

A rank stores an interval of a window's elements, flattened. Checkpoints hold boxes (an offset and a
size in every dimension) of the full parameter, which locate elements independently of the ranks
that had them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from gpumix.engine.sharding.nd_boxes import Box, split_into_boxes

IndexRange = tuple[int, int]


@dataclass(frozen=True)
class ParameterSlice:
    """Part `part` of `parts` equal parts of a tensor of `shape`, along `dim`; if `packed` tensors
    lie there in a row, the part of each.

    Raises:
        ValueError: the size along `dim` cannot be divided this way.
    """

    shape: torch.Size
    dim: int = 0
    parts: int = 1
    part: int = 0
    packed: int = 1

    def __post_init__(self) -> None:
        if not self.whole and self.shape[self.dim] % (self.parts * self.packed):
            raise ValueError(
                f"{self.shape[self.dim]} cannot be divided into {self.parts} x {self.packed} "
                "equal parts"
            )

    @property
    def whole(self) -> bool:
        """True if the window shows all of the tensor."""
        return self.parts == 1

    @property
    def runs(self) -> tuple[IndexRange, ...]:
        """Ranges of indices along `dim` in the window, as (begin, end)."""
        of_one = self.shape[self.dim] // self.packed
        size = of_one // self.parts
        begins = (tensor * of_one + self.part * size for tensor in range(self.packed))
        return tuple((begin, begin + size) for begin in begins)

    def of_member(self, part: int) -> ParameterSlice:
        """Return the window of another part."""
        return replace(self, part=part)

    @property
    def local_shape(self) -> torch.Size:
        """Shape of the window's content."""
        if self.whole:
            return self.shape
        sizes = list(self.shape)
        sizes[self.dim] //= self.parts
        return torch.Size(sizes)

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    def of_blocks(self, block: int) -> ParameterSlice:
        """Return the window of a tensor with one value for each `block` elements of the flattened
        tensor, the last of which may be fewer. Its shape does not depend on the window.

        Raises:
            ValueError: the window shows parts of blocks.
        """
        if self.shape and self.shape[-1] % block == 0:
            shape = torch.Size([*self.shape[:-1], self.shape[-1] // block])
            return replace(self, shape=shape)
        shape = torch.Size([-(-prod(self.shape) // block)])
        if self.whole:
            return ParameterSlice(shape)
        [run, *_] = (end - begin for begin, end in self.runs)
        if self.dim != 0 or run * prod(self.shape[1:]) % block:
            raise ValueError(f"parts along dimension {self.dim} cut blocks of {block} elements")
        return replace(self, shape=shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the window's content in a tensor of `shape`."""
        if self.whole:
            return tensor
        shown = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.runs]
        return shown[0] if len(shown) == 1 else torch.cat(shown, self.dim)

    def put(self, local: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write the window's content into a tensor of `shape`."""
        if self.whole:
            tensor.copy_(local)
            return
        sizes = [end - begin for begin, end in self.runs]
        for (begin, end), part in zip(self.runs, local.split(sizes, self.dim)):
            tensor.narrow(self.dim, begin, end - begin).copy_(part)

    def boxes(self, start: int, flat: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the boxes of the full tensor that elements [start, start + len(flat)) of the window
        fill, each with a view of `flat`."""
        found = split_into_boxes(self.local_shape, start, start + flat.numel())
        stretches = flat.split([prod(size) for _, size in found]) if found else ()
        for (offset, size), stretch in zip(found, stretches):
            yield from self._unfolded(offset, stretch.view(size))

    def _unfolded(
        self, offset: Sequence[int], part: torch.Tensor
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Locate `part`, at `offset` of the window, in the full tensor."""
        if self.whole:
            yield (tuple(offset), tuple(part.shape)), part
            return
        first, length = offset[self.dim], part.shape[self.dim]
        before = 0  # indices of the window so far
        for begin, end in self.runs:
            low, high = max(first, before), min(first + length, before + end - begin)
            if low < high:
                at = list(offset)
                at[self.dim] = begin + low - before
                view = part.narrow(self.dim, low - first, high - low)
                yield (tuple(at), tuple(view.shape)), view
            before += end - begin


class LocalParts:
    """Parts of parameters divided by other ranks, on a rank with several parts.

    Args:
        views: the parameters, as this rank computes with them.
        windows: slice of each parameter, by part.
    """

    def __init__(
        self, views: Sequence[torch.Tensor], windows: Sequence[Sequence[ParameterSlice]]
    ) -> None:
        self._views = views
        self._windows = windows

    def put(self, number: int, flat: torch.Tensor) -> None:
        """Write a part of each parameter from a flat vector."""
        windows = self._windows[number]
        rows = flat.split([window.numel for window in windows])
        for view, window, row in zip(self._views, windows, rows):
            window.put(row.view(window.local_shape), view.data)

    def copy_gradient(self, number: int, flat: torch.Tensor) -> None:
        """Write a part of each gradient into a flat vector."""
        windows = self._windows[number]
        rows = flat.split([window.numel for window in windows])
        for view, window, row in zip(self._views, windows, rows):
            assert view.grad is not None, "what got no gradient has one of zero"
            row.view(window.local_shape).copy_(window.of(view.grad))


def assemble_parameter(window: ParameterSlice, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Assemble a parameter from the elements of its windows."""
    if window.whole:
        return parts[0].view(window.shape)
    found = parts[0].new_empty(window.shape)
    for number, part in enumerate(parts):
        shown = window.of_member(number)
        shown.put(part.view(shown.local_shape), found)
    return found
