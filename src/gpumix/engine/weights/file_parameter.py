"""Parameters whose values are still in files: on the meta device, with the way to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from gpumix.schema.errors import InputError


class ValueSource(Protocol):
    """A tensor that can be read from files."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in files that it is made of."""

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end), flattened."""

    def read_all(self) -> torch.Tensor:
        """Return the tensor."""


@dataclass(frozen=True)
class _Cast:
    """A tensor in files, rounded to a dtype."""

    source: ValueSource
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.source.shape

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.source.read(start, end).to(self.dtype)

    def read_all(self) -> torch.Tensor:
        return self.source.read_all().to(self.dtype)


class FileParameter(nn.Parameter):
    """A parameter without values. Copies of it (`copy.deepcopy`) are read from the same files."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter outside of autograd; unlike torch's, it counts as changed together with
        the parameter."""
        return self.detach()

    @data.setter
    def data(self, given: torch.Tensor) -> None:
        source, version = vars(self)[_SOURCE]
        if not self._has_values_of(given):
            version -= 1
        elif given.dtype != self.dtype != source.dtype:
            source = _Cast(source, self.dtype)
        torch.Tensor.data.__set__(self, given)  # type: ignore[attr-defined]
        vars(self)[_SOURCE] = source, version

    @staticmethod
    def of(source: ValueSource, *, requires_grad: bool) -> FileParameter:
        """Return the parameter of a tensor in files."""
        data = torch.empty(source.shape, dtype=source.dtype, device="meta")
        made: FileParameter = torch.Tensor._make_subclass(FileParameter, data, requires_grad)
        set_source(made, source)
        return made

    def _has_values_of(self, given: torch.Tensor) -> bool:
        """Return False for a tensor that is neither this one nor this one in another dtype or
        memory format, nor a bias: transformers pads those, by nothing, when it ties parameters."""
        laid_out_alike = given.stride() == self.stride()
        if given.shape != self.shape or not (laid_out_alike or given.dim() in (4, 5)):
            return False
        own, other = (tensor.untyped_storage()._cdata for tensor in (self, given))
        is_other = own != other and given.dtype == self.dtype and laid_out_alike
        return not is_other or given.dim() == 1

    def __deepcopy__(self, memo: dict[int, Any]) -> FileParameter:
        if id(self) in memo:
            known: FileParameter = memo[id(self)]
            return known
        source, version = vars(self)[_SOURCE]
        copy = FileParameter.of(source, requires_grad=self.requires_grad)
        copy.data = copy.data.to(self.dtype)
        vars(copy)[_SOURCE] = source, copy._version + self._version - version
        memo[id(self)] = copy
        return copy


_SOURCE = "gpumix_source"


def set_source(parameter: nn.Parameter, source: ValueSource) -> None:
    """Let a parameter on the meta device have the values of `source`."""
    vars(parameter)[_SOURCE] = source, parameter._version


def has_source(parameter: object) -> bool:
    """Return True for a parameter whose values are still in files."""
    return isinstance(parameter, nn.Parameter) and parameter.is_meta and _SOURCE in vars(parameter)


def get_source(parameter: nn.Parameter) -> ValueSource:
    """Return the source of a parameter in files."""
    source: ValueSource = vars(parameter)[_SOURCE][0]
    return source


def read_values(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
    """Return elements [start, end) of a parameter with a source, flattened, in its dtype.

    Raises:
        InputError: the files cannot be read, or the parameter was changed since.
    """
    source, version = vars(parameter)[_SOURCE]
    if parameter._version != version:
        raise InputError(
            f"parameter '{name}' was changed in place, and its values were still in files",
            why="the change had no values to work on, and would be lost",
            fix="load the model without gpumix.lazy_weights, or change it after training began",
        )
    values: torch.Tensor = source.read(start, end)
    return values.to(parameter.dtype)
