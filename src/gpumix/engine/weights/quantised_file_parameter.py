"""Quantised parameters whose values are still in files: they look as their library's own, loaded
and quantised, and refuse operations that need values."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from gpumix.engine.weights.file_parameter import (
    FileParameter,
    get_source,
    make_valueless_error,
    set_source,
)
from gpumix.engine.weights.quantised_source import PartSource, QuantisedParameterSource


class QuantisedFileParameter(FileParameter):
    """The part that a library's class of parameters is mixed with."""

    # A library's own would quantise, or move constants first.
    to = torch.Tensor.to
    cpu = torch.Tensor.cpu
    cuda = torch.Tensor.cuda
    xpu = torch.Tensor.xpu  # type: ignore[attr-defined]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, given: torch.Tensor) -> None:
        if given is not self:  # as when a module is cast, which leaves packed values as they are
            raise make_valueless_error("data", [self])

    def __deepcopy__(self, memo: dict[int, Any]) -> FileParameter:
        if id(self) not in memo:
            memo[id(self)] = make_quantised_parameter(self._packed_source)
        found: FileParameter = memo[id(self)]
        return found

    def __copy__(self) -> nn.Parameter:
        return make_quantised_parameter(self._packed_source)

    @property
    def _packed_source(self) -> QuantisedParameterSource:
        source = get_source(self)
        assert isinstance(source, QuantisedParameterSource)
        return source

    def _with_own_values(self, made: torch.Tensor) -> FileParameter:
        """Return the packed values alone, of which no other dtype has the same meaning."""
        source = PartSource(self._packed_source, self._packed_source.format.parts[0])
        if made.dtype != source.dtype:
            raise make_valueless_error(f"to({made.dtype})", [self])
        return FileParameter.of(source, requires_grad=False)


def make_quantised_parameter(source: QuantisedParameterSource) -> nn.Parameter:
    """Return the parameter of a quantised weight in files."""
    parts = source.format.parts
    tensors: dict[str, torch.Tensor] = {
        part.name: FileParameter.of(PartSource(source, part), requires_grad=False)
        for part in parts[1:]
    }
    tensors[parts[0].name] = torch.empty(parts[0].shape, dtype=parts[0].dtype, device="meta")
    made = source.format.restore_without_values(tensors)
    made.__class__ = _mix(type(made))
    set_source(made, source)
    return made


@cache
def _mix(kind: type) -> type:
    """Return the class of a library's parameters in files. It has the name of `kind`, by which
    libraries know it."""
    return type(kind.__name__, (QuantisedFileParameter, kind), {"__module__": kind.__module__})
