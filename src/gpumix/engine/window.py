"""Which part of a parameter a rank computes with: all of it, or, where ranks compute a unit
together, runs along one dimension.

What a rank has of a window, it has as an interval of its elements, flattened. Checkpoints hold
boxes (an offset and a size in every dimension) of the whole parameter, which say where elements are
without a word about who had them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from gpumix.engine.boxes import Box, boxes

Run = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Part `part` of `parts` equal ones of a tensor of `shape`, along `dim`; where `packed` tensors
    lie there in a row, that part of each.

    Raises:
        ValueError: it cannot be divided so.
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
        """Whether it shows all of the tensor."""
        return self.parts == 1

    @property
    def runs(self) -> tuple[Run, ...]:
        """The indices along `dim` that it shows, as (begin, end)."""
        of_one = self.shape[self.dim] // self.packed
        size = of_one // self.parts
        begins = (tensor * of_one + self.part * size for tensor in range(self.packed))
        return tuple((begin, begin + size) for begin in begins)

    def of_member(self, part: int) -> Window:
        """The same for another part."""
        return replace(self, part=part)

    @property
    def local_shape(self) -> torch.Size:
        """That of what the window shows."""
        if self.whole:
            return self.shape
        sizes = list(self.shape)
        sizes[self.dim] //= self.parts
        return torch.Size(sizes)

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What it shows of a tensor of `shape`."""
        if self.whole:
            return tensor
        shown = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.runs]
        return shown[0] if len(shown) == 1 else torch.cat(shown, self.dim)

    def put(self, local: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write what it shows into a tensor of `shape`."""
        if self.whole:
            tensor.copy_(local)
            return
        sizes = [end - begin for begin, end in self.runs]
        for (begin, end), part in zip(self.runs, local.split(sizes, self.dim)):
            tensor.narrow(self.dim, begin, end - begin).copy_(part)

    def boxes(self, start: int, flat: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of the whole tensor that elements [start, start + len(flat)) of the window are,
        each with a view of `flat`."""
        found = boxes(self.local_shape, start, start + flat.numel())
        stretches = flat.split([prod(size) for _, size in found]) if found else ()
        for (offset, size), stretch in zip(found, stretches):
            yield from self._unfolded(offset, stretch.view(size))

    def _unfolded(
        self, offset: Sequence[int], part: torch.Tensor
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Where `part`, at `offset` of the window, is in the whole tensor."""
        if self.whole:
            yield (tuple(offset), tuple(part.shape)), part
            return
        first, length = offset[self.dim], part.shape[self.dim]
        before = 0  # of the window's indices
        for begin, end in self.runs:
            low, high = max(first, before), min(first + length, before + end - begin)
            if low < high:
                at = list(offset)
                at[self.dim] = begin + low - before
                view = part.narrow(self.dim, low - first, high - low)
                yield (tuple(at), tuple(view.shape)), view
            before += end - begin
