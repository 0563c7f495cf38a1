"""Quantised parameters in modules: views of gathered bytes, placeholders between gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpumix.engine.quantised.quantised_parameter import (
    ModuleAttribute,
    ModuleParameter,
    WeightFormat,
    restore_module_parameter,
)


@dataclass(frozen=True)
class QuantisedParameterView:
    """A quantised parameter in a flat buffer. Tensors that modules hold next to it come and go
    with it; without values, modules hold None.

    Attributes:
        places: modules with the attribute that holds the parameter.
        flat: the bytes in the buffer; `shown` are views of it for the modules.
        at_rest: views of the masters, for use between steps, if this rank has all masters.
    """

    places: Sequence[tuple[nn.Module, str]]
    format: WeightFormat
    flat: torch.Tensor
    shown: ModuleParameter
    at_rest: ModuleParameter | None

    @classmethod
    def of(
        cls,
        places: Sequence[tuple[nn.Module, str]],
        form: WeightFormat,
        flat: torch.Tensor,
        master: torch.Tensor | None,
    ) -> QuantisedParameterView:
        owners = [module for module, _ in places]
        at_rest = None if master is None else restore_module_parameter(form, master, owners)
        return cls(places, form, flat.data, restore_module_parameter(form, flat, owners), at_rest)

    def make_placeholder(self) -> nn.Parameter:
        """Return a parameter that looks like the weight, without memory of its own."""
        look = self.shown.parameter
        empty = torch.empty((), dtype=look.dtype, device=self.flat.device).expand(look.shape)
        return nn.Parameter(empty, requires_grad=False)

    def fill(self, generator: torch.Generator | None) -> None:
        """Fill the buffer with typical values."""
        self.format.fill(self.flat, generator)

    def install(self) -> None:
        """Install what belongs to the gathered parameter."""
        _set(self.shown.attributes)

    def install_copy(self) -> nn.Parameter:
        """Install what belongs to a copy of the gathered parameter; return the copy."""
        owners = [module for module, _ in self.places]
        copy = restore_module_parameter(self.format, self.flat.clone(), owners)
        _set(copy.attributes)
        return copy.parameter

    def remove(self) -> None:
        """Remove what belongs to the parameter."""
        for one in self.shown.attributes:
            if one.holds_values:
                one.holder[one.key] = None

    def rest(self) -> None:
        """Install the parameter with the masters' values, if this rank has all masters."""
        if self.at_rest is not None:
            for module, attribute in self.places:
                module._parameters[attribute] = self.at_rest.parameter
            _set(self.at_rest.attributes)


def _set(attributes: Sequence[ModuleAttribute]) -> None:
    for one in attributes:
        one.holder[one.key] = one.value
