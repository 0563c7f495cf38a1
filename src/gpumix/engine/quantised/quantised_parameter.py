"""Quantised parameters, each as one flat vector of bytes.

A quantised parameter consists of several tensors: packed values, scales, offsets. Here they lie in
a row, so the engine shards, gathers and counts them as one frozen parameter, and a gather moves a
weight of four bits as four bits. Modules get the library's own parameter, whose tensors are views
of the gathered bytes. Tables that belong to a format, equal for all its weights, are kept apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gpumix.schema.errors import InputError

PART_BYTES = 16  # alignment of a part; kernels load vectors of this size
WEIGHT_BYTES = 64  # alignment of a weight
# Scale of the weights of a unit that is measured without its values.
TYPICAL_WEIGHT = 0.05

SAME_FORMAT = "quantise the model as the weights were, or give weights in 16 bits"

Tensors = Mapping[str, torch.Tensor]


class ModuleAttribute(NamedTuple):
    """An entry of an object's dictionary that a module needs beside a restored parameter: tensors
    of the weight, or (not `holds_values`) a setting."""

    holder: dict[str, Any]
    key: str
    value: Any
    holds_values: bool = True


@dataclass(frozen=True)
class InnerTensor:
    """A tensor of a quantised parameter, `begin` bytes from the weight's begin."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def lay_out_inner_tensors(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
) -> tuple[InnerTensor, ...]:
    """Return the parts of tensors, given by name, dtype and shape, in a row."""
    parts: list[InnerTensor] = []
    begin = 0
    for name, dtype, shape in tensors:
        parts.append(InnerTensor(name, dtype, tuple(shape), begin))
        begin = -(-parts[-1].end // PART_BYTES) * PART_BYTES
    return tuple(parts)


@dataclass(frozen=True)
class WeightFormat(ABC):
    """Format of a quantised parameter.

    Attributes:
        kind: name of the format, for people and for comparison with a saved base.
        shape, dtype: of the weight as it is computed with.
        parts: its tensors.
        asked_first: attributes of the parameter that modules look at before its values.
    """

    kind: str
    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[InnerTensor, ...]

    asked_first: ClassVar[tuple[str, ...]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the flat vector."""
        return -(-self.parts[-1].end // WEIGHT_BYTES) * WEIGHT_BYTES

    @abstractmethod
    def tensors(self, parameter: nn.Parameter, module: nn.Module) -> Tensors | None:
        """Return the tensors of a module's parameter, by part; None if still to be quantised."""

    @abstractmethod
    def quantise(self, values: torch.Tensor) -> Tensors:
        """Quantise a weight's values, and return the tensors by part."""

    @abstractmethod
    def restore(self, tensors: Tensors) -> nn.Parameter:
        """Return the library's parameter with these tensors."""

    def restore_without_values(self, tensors: Tensors) -> nn.Parameter:
        """Return the library's parameter with tensors that refuse to be read."""
        return self.restore(tensors)

    @abstractmethod
    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        """Return a weight's values in `dtype`."""

    @property
    @abstractmethod
    def suffixes(self) -> Sequence[str]:
        """Suffixes of the parameter's name in the module's state dict; those with a slash are of
        names beside the parameter's."""

    @abstractmethod
    def state_entries(self, tensors: Tensors) -> Mapping[str, torch.Tensor]:
        """Return the entries of the module's state dict, by suffix."""

    @abstractmethod
    def read_entries(self, entries: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the tensors of all entries of a state dict, by suffix."""

    @abstractmethod
    def typical(self, part: InnerTensor) -> float | None:
        """Return a typical value of a constant; None for packed values, where any byte will do."""

    def check_compute_dtype(self, dtype: torch.dtype) -> None:  # noqa: B027 - most take any
        """Check that a device may compute in `dtype` with the weight.

        Raises:
            InputError: it may not.
        """

    def attributes(self, parameter: nn.Parameter, module: nn.Module) -> Sequence[ModuleAttribute]:
        """Return the tensors that a module needs beside its `parameter`, made by `restore`."""
        return ()

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors inside a vector of bytes."""
        return {
            part.name: flat[part.begin : part.end].view(part.dtype).view(part.shape)
            for part in self.parts
        }

    def stand_in(self, tensors: Tensors) -> nn.Parameter:
        """Return a parameter with the attributes of `restore`, of fake tensors."""
        like = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        made = nn.Parameter(tensors[self.parts[0].name], requires_grad=False)
        vars(made).update(vars(self.restore(like)))
        return made

    def read(self, tensors: Tensors, start: int, end: int) -> torch.Tensor:
        """Return bytes [start, end) of the vector of `tensors`."""
        found = torch.zeros(end - start, dtype=torch.uint8)
        for part in self.parts:
            low, high = max(start, part.begin), min(end, part.end)
            if low < high:
                flat = tensors[part.name].detach().contiguous().reshape(-1).view(torch.uint8)
                found[low - start : high - start] = flat[low - part.begin : high - part.begin]
        return found

    def entry_names(self, name: str) -> dict[str, str]:
        """Return the names of the state dict's entries for parameter `name`, by suffix."""
        prefix = name.rpartition(".")[0]
        beside = f"{prefix}." if prefix else ""
        return {s: beside + s[1:] if s.startswith("/") else name + s for s in self.suffixes}

    def pack_entries(self, name: str, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the bytes of parameter `name` of a state dict.

        Raises:
            InputError: entries are missing, or are of another format.
        """
        names = self.entry_names(name)
        missing = [key for key in names.values() if key not in state]
        what = f"the weights of '{name}' are not in {self.kind}, as the model has them"
        if missing:
            raise InputError(
                what,
                code="quantised-format-mismatch",
                why=f"there is no '{missing[0]}'",
                fix=SAME_FORMAT,
            )
        tensors = self.read_entries({suffix: state[key] for suffix, key in names.items()})
        for part in self.parts:
            found = tensors[part.name]
            if (tuple(found.shape), found.dtype) != (part.shape, part.dtype):
                why = f"'{part.name}' is {found.dtype} of shape {tuple(found.shape)}"
                raise InputError(what, code="quantised-format-mismatch", why=why, fix=SAME_FORMAT)
        return self.read(tensors, 0, self.nbytes)

    @torch.no_grad()
    def fill(self, flat: torch.Tensor, generator: torch.Generator | None = None) -> None:
        """Fill a vector with a weight of typical size, for measurements."""
        flat.zero_()
        for part in self.parts:
            view, value = flat[part.begin : part.end], self.typical(part)
            if value is not None:
                view.view(part.dtype).fill_(value)
            else:  # repeated: random numbers are slow
                block = torch.randint(256, (min(4096, len(view)),), generator=generator)
                times = -(-len(view) // max(1, len(block)))
                view.copy_(block.to(torch.uint8).repeat(times)[: len(view)])


class QuantisedParameter(nn.Parameter):
    """A quantised parameter of a module, as the engine sees it: bytes, frozen, without values.

    Attributes:
        original: the module's parameter, quantised or still to be quantised.
        owner: the module.
    """

    format: WeightFormat
    original: nn.Parameter
    owner: nn.Module

    @staticmethod
    def of(original: nn.Parameter, owner: nn.Module, form: WeightFormat) -> QuantisedParameter:
        data = torch.empty(form.nbytes, dtype=torch.uint8, device="meta")
        packed: QuantisedParameter = torch.Tensor._make_subclass(QuantisedParameter, data, False)
        packed.format, packed.original, packed.owner = form, original, owner
        return packed

    def without_values(self) -> nn.Parameter:
        """Return the module's parameter, quantised, on the meta device."""
        flat = torch.empty(self.format.nbytes, dtype=torch.uint8, device="meta")
        return self.format.restore(self.format.views(flat))

    def tensors(self) -> Tensors | None:
        """Return the parameter's tensors, by part; None if still to be quantised."""
        return self.format.tensors(self.original, self.owner)


class ModuleParameter(NamedTuple):
    """A parameter for modules, with the tensors that modules need beside it."""

    parameter: nn.Parameter
    attributes: Sequence[ModuleAttribute] = ()


def restore_module_parameter(
    form: WeightFormat, flat: torch.Tensor, owners: Sequence[nn.Module]
) -> ModuleParameter:
    """Return what modules get for a weight whose bytes are `flat`, a part of a buffer."""
    # `.data` gives the view a separate version counter: to autograd, the next gather is no
    # in-place change of saved tensors.
    restore = form.stand_in if isinstance(flat, FakeTensor) else form.restore
    restored = restore(form.views(flat.data))
    return ModuleParameter(restored, [one for m in owners for one in form.attributes(restored, m)])
