"""Places of packed weights in modules: views of gathered bytes, placeholders between gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gpumix.engine.quantised.packed_weight import (
    Attribute,
    Installed,
    WeightFormat,
    show_in_modules,
)


@dataclass(frozen=True)
class _PackedPlace:
    """A packed weight in a buffer.

    Attributes:
        places: modules with the attribute that holds the parameter.
        flat: the bytes in the buffer; `shown` are views of it for the modules.
        rest: views of the masters, for use between steps, if this rank has all masters.
    """

    places: Sequence[tuple[nn.Module, str]]
    format: WeightFormat
    flat: torch.Tensor
    shown: Installed
    rest: Installed | None

    def view(self, flat: torch.Tensor) -> Installed:
        return show_in_modules(self.format, flat, [module for module, _ in self.places])


@dataclass
class PackedPlaces:
    """Packed weights of a flat group. Tensors that modules hold beside a parameter come and go with
    it; without values, modules hold None."""

    _places: list[_PackedPlace] = field(default_factory=list)

    def add(
        self,
        places: Sequence[tuple[nn.Module, str]],
        form: WeightFormat,
        flat: torch.Tensor,
        master: torch.Tensor | None,
    ) -> tuple[nn.Parameter, nn.Parameter]:
        """Add a weight in these places of modules; return the parameter for modules, and one that
        only looks like it, to make a placeholder of."""
        owners = [module for module, _ in places]
        shown = show_in_modules(form, flat, owners)
        rest = None if master is None else show_in_modules(form, master, owners)
        self._places.append(_PackedPlace(places, form, flat.data, shown, rest))
        look = shown.parameter
        empty = torch.empty((), dtype=look.dtype, device=flat.device).expand(look.shape)
        return look, nn.Parameter(empty, requires_grad=False)

    def fill(self, generator: torch.Generator | None) -> None:
        """Fill the buffer with typical values."""
        for place in self._places:
            place.format.fill(place.flat, generator)

    def install(self) -> None:
        """Install what belongs to the gathered parameters."""
        for place in self._places:
            _set(place.shown.attributes)

    def install_copies(self) -> dict[int, nn.Parameter]:
        """Install what belongs to copies of the gathered parameters; return the copies, by identity
        of the parameters."""
        copies = {}
        for place in self._places:
            copy = place.view(place.flat.clone())
            copies[id(place.shown.parameter)] = copy.parameter
            _set(copy.attributes)
        return copies

    def remove(self) -> None:
        """Remove what belongs to the parameters."""
        for place in self._places:
            for one in place.shown.attributes:
                if one.holds_values:
                    one.holder[one.key] = None

    def rest(self) -> None:
        """Install the parameters with the masters' values, if this rank has all masters."""
        for place in self._places:
            if place.rest is not None:
                for module, attribute in place.places:
                    module._parameters[attribute] = place.rest.parameter
                _set(place.rest.attributes)


def _set(attributes: Sequence[Attribute]) -> None:
    for one in attributes:
        one.holder[one.key] = one.value
