"""Adapters of PEFT in a model, by PEFT's own classes, without importing PEFT.

PEFT wraps a layer: the layer becomes `base_layer` of a module that has the adapter's parameters
too. So names of the base model's parameters change, and files with its weights lack the adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

_WRAPPED = re.compile(r"(?<=\.)(base_layer|original_module|modules_to_save\.[^.]+)\.")
_PREFIX = "base_model.model."  # of a `PeftModel`


class RowLengths(nn.Parameter):
    """A parameter of DoRA, on the meta device: at first the length of each row of a layer's weight,
    computed when it is read.

    Attributes:
        layer: the layer.
    """

    layer: nn.Module

    @staticmethod
    def of(layer: nn.Module, values: torch.Tensor) -> RowLengths:
        made: RowLengths = torch.Tensor._make_subclass(RowLengths, values, True)
        made.layer = layer
        return made


def iterate_adapter_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that wrap a layer with adapters, by name."""
    for name, module in model.named_modules():
        if hasattr(type(module), "adapter_layer_names") and hasattr(module, "base_layer"):
            yield name, module


def list_adapter_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that adapters add to a model."""
    found = set()
    for prefix, module in iterate_adapter_layers(model):
        for name in type(module).adapter_layer_names:  # type: ignore[attr-defined]
            held = getattr(module, name, None)
            own = held.named_parameters() if isinstance(held, nn.Module) else ()
            found |= {f"{prefix}.{name}.{key}" for key, _ in own}
    return found


def find_base_name(name: str) -> str:
    """Return the name that a parameter had before adapters were added."""
    return _WRAPPED.sub("", name.removeprefix(_PREFIX))
