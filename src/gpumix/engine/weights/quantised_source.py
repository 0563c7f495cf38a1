"""Bytes of a weight that files have quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpumix.engine.quantised.packed_weight import Tensors, WeightFormat
from gpumix.engine.weights.safetensors_files import FileTensor


@dataclass(frozen=True)
class QuantisedSource:
    """A quantised weight in files, read as the vector of bytes that ranks divide.

    Attributes:
        entries: its tensors, by suffix of the parameter's name in a state dict.
    """

    format: WeightFormat
    entries: Mapping[str, FileTensor]

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.format.nbytes])

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stored.name for stored in self.entries.values())

    def read_tensors(self) -> Tensors:
        """Return the tensors of the weight, by part."""
        entries = {suffix: stored.read_all() for suffix, stored in self.entries.items()}
        return self.format.read_entries(entries)

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.format.read(self.read_tensors(), start, end)

    def read_all(self) -> torch.Tensor:
        return self.read(0, self.format.nbytes)
