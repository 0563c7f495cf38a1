"""Adapters of PEFT in a model, by PEFT's own classes, without importing PEFT.

PEFT wraps a layer: the layer becomes `base_layer` of a module that has the adapter's parameters
too. So names of the base model's parameters change, and files with its weights lack the adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_WRAPPED = re.compile(r"(?<=\.)(base_layer|original_module|modules_to_save\.[^.]+)\.")
_PREFIX = "base_model.model."  # of a `PeftModel`
# Of layers with adapters, which PEFT switches all at once, and of the model around them.
_SWITCHES = ("_disable_adapters", "_active_adapter", "_adapters_disabled")


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


def list_disabled_adapters(model: nn.Module) -> dict[str, Any]:
    """Return the layers whose adapters are disabled, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if vars(module).get(_SWITCHES[0]) is True and hasattr(module, "enable_adapters")
    }


@contextmanager
def enable_adapters(model: nn.Module) -> Iterator[None]:
    """Enable a model's disabled adapters in the body.

    PEFT freezes adapters while these are disabled, as in `with model.disable_adapter():`. Plans and
    engines are for the model that is trained, where adapters are not frozen.
    """
    disabled = list_disabled_adapters(model).values()
    for layer in disabled:
        layer.enable_adapters(True)
    try:
        yield
    finally:
        for layer in disabled:
            layer.enable_adapters(False)


class AdapterSwitches:
    """The switches of a model's adapters: which are active, and whether they are off.

    A call of the model that changes them means its own micro-batch alone. Micro-batches run in
    turn, and units are run again in backward, after the call has changed them back.

    Attributes:
        holders: attributes of the first layer with adapters, and of PEFT's models.
    """

    def __init__(self, model: nn.Module) -> None:
        every = [vars(module) for module in model.modules()]
        layers = [own for own in every if _SWITCHES[0] in own]
        self.holders = [*layers[:1], *(own for own in every if _SWITCHES[2] in own)]

    def read(self) -> list[Any]:
        """Return what the switches are."""
        return [own.get(name) for own in self.holders for name in _SWITCHES]
