"""Parameters whose values are still in files: on the meta device, with the way to read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gpumix.schema.errors import InputError

_MOVES = {"to", "cpu", "cuda"}
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_BY_SHAPE = {f"{kind}_like" for kind in _LIKE} | {f"new_{kind}" for kind in (*_LIKE, "tensor")}
_CASTS = {"to", "type", "float", "double", "half", "bfloat16"}
# transformers pads biases, by nothing, when it ties parameters
_SAME_VALUES = {*_CASTS, "detach", "contiguous", "pad"}


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
    """A parameter without values. Copies of it (`copy.deepcopy`), in other dtypes too, are read
    from the same files. Operations that need values raise `InputError`."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch that looks at shapes and flags, and refuse others: what it
        computes on the meta device is nothing, or an error from the depths of torch."""
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, FileParameter)]
        versions = [one._get_version() for one in given]
        name = getattr(function, "__name__", str(function))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **(kwargs or {}))
        except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
            if any(one.is_meta for one in given):
                raise make_valueless_error(name, given) from error
            raise
        if versions != [one._get_version() for one in given]:
            raise make_valueless_error(name, given)
        if function is _GET_GRADIENT or name in _BY_SHAPE:
            return found
        computed = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        if all(any(one is own for own in given) for one in computed):
            return found
        if name in _SAME_VALUES and found.is_meta and found.shape == args[0].shape:
            return args[0]._with_own_values(found)
        raise make_valueless_error(name, given)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise make_valueless_error("pickle", [self])

    def _get_version(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return self._version

    def _take_values_of(self, other: FileParameter) -> None:
        """Have the values of another parameter from now on, in the own dtype."""
        source, version = vars(other)[_SOURCE]
        if self.dtype != other.dtype != source.dtype:
            source = _Cast(source, other.dtype)
        vars(self)[_SOURCE] = source, self._version - (other._version - version)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The parameter outside of autograd; unlike torch's, it counts as changed together with
        the parameter."""
        return self.detach()

    @data.setter
    def data(self, given: torch.Tensor) -> None:
        if not isinstance(given, FileParameter):
            raise make_valueless_error("data", [self])
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, given)  # type: ignore[attr-defined]
        self._take_values_of(given)

    @staticmethod
    def of(source: ValueSource, *, requires_grad: bool) -> FileParameter:
        """Return the parameter of a tensor in files."""
        data = torch.empty(source.shape, dtype=source.dtype, device="meta")
        made: FileParameter = torch.Tensor._make_subclass(FileParameter, data, requires_grad)
        set_source(made, source)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> FileParameter:
        if id(self) in memo:
            known: FileParameter = memo[id(self)]
            return known
        memo[id(self)] = copy = self._with_own_values(torch.empty_like(self))
        copy.requires_grad_(self.requires_grad)
        return copy

    def _with_own_values(self, made: torch.Tensor) -> FileParameter:
        """Return a tensor on the meta device as a parameter with the values of this one."""
        found: FileParameter = torch.Tensor._make_subclass(FileParameter, made, False)
        found._take_values_of(self)
        return found


_SOURCE = "gpumix_source"
_GET_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]


def make_valueless_error(operation: str, parameters: list[FileParameter]) -> InputError:
    """Return the error for an operation on the values of parameters in files."""
    operation = operation.strip("_")
    now = "leave it out" if operation in _MOVES else "do this after training began"
    return InputError(
        f"`{operation}` needs values that gpumix.from_pretrained, or gpumix.lazy_weights, has left "
        "in files",
        code="values-still-in-files",
        where=next((f"'{name}'" for one in parameters for name in get_source(one).names), ""),
        why="each rank reads the part of the weights that its device stores, when Trainer, "
        "Accelerator or gpumix.prepare shards the model",
        fix=f"{now}; or load the model with `from_pretrained` of transformers",
    )


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
            code="file-parameter-changed",
            why="the change had no values to work on, and would be lost",
            fix="load the model without gpumix.lazy_weights, or change it after training began",
        )
    values: torch.Tensor = source.read(start, end)
    return values.to(parameter.dtype)
