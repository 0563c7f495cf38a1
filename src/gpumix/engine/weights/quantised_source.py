"""Bytes of quantised weights whose values are in files, quantised there or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpumix.engine.quantised.quantised_parameter import InnerTensor, Tensors, WeightFormat
from gpumix.engine.weights.file_parameter import ValueSource
from gpumix.engine.weights.safetensors_files import FileTensor


@dataclass(frozen=True)
class QuantisedParameterSource(ABC):
    """A quantised weight, read from files as the vector of bytes that ranks divide."""

    format: WeightFormat

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.format.nbytes])

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in files that it is made of."""

    @abstractmethod
    def read_tensors(self) -> Tensors:
        """Return the tensors of the weight, by part."""

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.format.read(self.read_tensors(), start, end)

    def read_all(self) -> torch.Tensor:
        return self.read(0, self.format.nbytes)


@dataclass(frozen=True)
class QuantisedSource(QuantisedParameterSource):
    """A weight that files have quantised.

    Attributes:
        entries: its tensors, by suffix of the parameter's name in a state dict.
    """

    entries: Mapping[str, FileTensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stored.name for stored in self.entries.values())

    def read_tensors(self) -> Tensors:
        entries = {suffix: stored.read_all() for suffix, stored in self.entries.items()}
        return self.format.read_entries(entries)


@dataclass(frozen=True)
class UnquantisedSource(QuantisedParameterSource):
    """A weight that is quantised when it is read, in full and on the host: all ranks get equal
    bytes.

    Attributes:
        source: its values, which are rounded to `loaded_as` first.
    """

    source: ValueSource
    loaded_as: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    @torch.no_grad()
    def read_tensors(self) -> Tensors:
        return self.format.quantise(self.source.read_all().to(self.loaded_as))


@dataclass(frozen=True)
class PartSource:
    """A tensor of a quantised weight."""

    weight: QuantisedParameterSource
    part: InnerTensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.part.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return self.weight.names

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.read_all().reshape(-1)[start:end]

    def read_all(self) -> torch.Tensor:
        return self.weight.read_tensors()[self.part.name].reshape(self.shape)
