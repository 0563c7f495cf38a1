"""Layout of a batch's tensors in one buffer: several workers write parts of a batch, and assembly
needs no copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = dict[str, Tensor]

_ALIGNED_BYTES = 64


@dataclass(frozen=True)
class TensorField:
    """A tensor of a batch: `offset` bytes into the buffer, `shape` without the samples."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class BatchLayout:
    """The tensors of a batch of `rows` rows, one after another."""

    rows: int
    fields: tuple[TensorField, ...]
    nbytes: int

    @classmethod
    def of(cls, like: Mapping[str, Tensor], rows: int) -> BatchLayout:
        """Return the layout for tensors like `like`, with samples in the first dimension."""
        fields, offset = [], 0
        for key, value in like.items():
            fields.append(TensorField(key, value.dtype, tuple(value.shape[1:]), offset))
            size = rows * value.shape[1:].numel() * value.element_size()
            offset += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return cls(rows, tuple(fields), offset)

    def views(self, buffer: Tensor) -> Batch:
        """Return the tensors as views of `buffer`, a tensor of bytes."""
        found = {}
        for field in self.fields:
            shape = torch.Size((self.rows, *field.shape))
            size = shape.numel() * field.dtype.itemsize
            part = buffer[field.offset : field.offset + size]
            found[field.key] = part.view(field.dtype).view(shape)
        return found

    def fits(self, values: Mapping[str, Tensor]) -> bool:
        """Return whether `values` are rows of tensors with this layout."""
        known = {f.key: (f.dtype, f.shape) for f in self.fields}
        return known == {key: (v.dtype, tuple(v.shape[1:])) for key, v in values.items()}
