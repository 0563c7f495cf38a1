"""Weights of torchao: tensors of its own classes, which hold packed values and scales as ordinary
tensors and compute in one dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpumix.engine.quantised.quantised_parameter import (
    TYPICAL_WEIGHT,
    InnerTensor,
    Tensors,
    WeightFormat,
    lay_out_inner_tensors,
)
from gpumix.schema.errors import InputError


@dataclass(frozen=True)
class TorchaoFormat(WeightFormat):
    """Format of a tensor of torchao.

    Attributes:
        tensor_class: its class.
        context: what the class keeps beside tensors.
    """

    tensor_class: Any = None
    context: Any = field(default=None, hash=False)

    @classmethod
    def of(cls, parameter: Any) -> TorchaoFormat:
        """Return the format of a parameter whose data is torchao's."""
        names, context = parameter.__tensor_flatten__()
        inner = [(name, getattr(parameter, name)) for name in names]
        nested = next((name for name, one in inner if hasattr(one, "__tensor_flatten__")), None)
        if nested is not None:
            raise InputError(
                f"a weight of torchao ({type(parameter).__name__}) holds tensors of other classes",
                code="quantised-format-unsupported",
                why=f"'{nested}' of it is a {type(getattr(parameter, nested)).__name__}",
                fix="quantise by Int8WeightOnlyConfig or Int4WeightOnlyConfig of this torchao",
            )
        return cls(
            kind=f"torchao-{type(parameter).__name__}",
            shape=parameter.shape,
            dtype=parameter.dtype,
            parts=lay_out_inner_tensors([(name, one.dtype, one.shape) for name, one in inner]),
            tensor_class=type(parameter),
            context=context,
        )

    def check_compute_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            raise InputError(
                f"weights of torchao compute in {self.dtype}, and a device is to compute in "
                f"{dtype}",
                code="quantised-dtype-mismatch",
                fix="load the model in that dtype before it is quantised, or let all devices "
                "compute in the dtype of the weights (`precision`)",
            )

    def tensors(self, parameter: Any, module: nn.Module) -> Tensors:
        return {part.name: getattr(parameter, part.name) for part in self.parts}

    def quantise(self, values: torch.Tensor) -> Tensors:
        raise AssertionError("torchao's tensors are quantised from the start")

    def restore(self, tensors: Tensors) -> nn.Parameter:
        stride = torch.empty(self.shape, device="meta").stride()
        made = self.tensor_class.__tensor_unflatten__(
            dict(tensors), self.context, self.shape, stride
        )
        return nn.Parameter(made, requires_grad=False)

    def stand_in(self, tensors: Tensors) -> nn.Parameter:
        return self.restore(tensors)

    def dequantise(self, tensors: Tensors) -> torch.Tensor:
        made: Any = self.restore(tensors)
        found: torch.Tensor = made.dequantize()
        return found

    @property
    def suffixes(self) -> Sequence[str]:
        return ("",)

    def state_entries(self, tensors: Tensors) -> Mapping[str, torch.Tensor]:
        return {"": self.restore(tensors).data}

    def read_entries(self, entries: Mapping[str, torch.Tensor]) -> Tensors:
        if type(entries[""]) is not self.tensor_class:
            raise InputError(
                f"a weight is a {type(entries[''].data).__name__}, the model has "
                f"{self.tensor_class.__name__}",
                code="quantised-format-mismatch",
                fix="give the state of a model that was quantised in the same way",
            )
        return {part.name: getattr(entries[""], part.name) for part in self.parts}

    def typical(self, part: InnerTensor) -> float | None:
        if part is self.parts[0]:
            return None
        return TYPICAL_WEIGHT / 64 if part.dtype.is_floating_point else 0
