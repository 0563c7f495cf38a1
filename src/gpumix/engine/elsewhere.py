"""What stands in for parameters and units of other stages.

A stage runs the model's own forward up to its last unit call, and so comes by code and by calls
that are other stages' affair. There it meets tensors that have a shape but no values (PyTorch's
fake tensors): they take no memory and next to no time, and what is made from them has no values
either. What a stage needs of earlier ones takes their place, as the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from gpumix.engine.boundary import cast
from gpumix.engine.captured import Captured
from gpumix.engine.coroutine import ModelError, UnitCall
from gpumix.engine.units import Slot, Unit


@dataclass(frozen=True)
class Look:
    """Of a tensor that a call returns."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Returned:
    """What a unit call returns, and what is collected beside: tensors by their looks."""

    leaves: tuple[Any, ...]
    structure: TreeSpec

    def look(self, output: int) -> Look:
        """That of the tensor at place `output`."""
        found = self.leaves[output]
        assert isinstance(found, Look), "the plan takes a tensor"
        return found


class Elsewhere:
    """The units of a model that other stages compute, and the parameters that they keep.

    Args:
        units: by name; their own forward must not have been replaced yet.
        dtype: that floating parameters are computed in here.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device, dtype: torch.dtype) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._dtype = dtype
        self._units = {unit.name: unit for unit in units}
        self._forwards: dict[str, Callable[..., Any]] = {
            unit.name: unit.module.forward for unit in units
        }
        self._returned: dict[object, Returned] = {}
        for unit in units:
            self.install(unit.slots)

    def install(self, slots: Sequence[Slot]) -> None:
        """Put parameters without values in the places of these."""
        for slot in slots:
            old = slot.parameter
            dtype = self._dtype if old.is_floating_point() else old.dtype
            fake = nn.Parameter(self.tensor(Look(old.shape, dtype)), requires_grad=False)
            for module, attribute in slot.places:
                module._parameters[attribute] = fake

    def tensor(self, look: Look) -> torch.Tensor:
        """One without values."""
        with self._mode:
            return torch.empty(look.shape, dtype=look.dtype, device=self._device)

    def returned(self, call: UnitCall) -> Returned:
        """What the unit of another stage would return.

        Raises:
            ModelError: that cannot be told without its values.
        """
        inputs, structure = tree_flatten((call.args, call.kwargs))
        kind = self._units[call.unit].kind
        key = (kind, str(structure), tuple(map(_look_of, inputs)))
        if key not in self._returned:
            self._returned[key] = self._tried(call)
        return self._returned[key]

    def _tried(self, call: UnitCall) -> Returned:
        captured = Captured(call.context)
        args, kwargs = tree_map(self._without_values, (call.args, call.kwargs))
        try:
            with call.state.applied(), torch.no_grad():
                outputs = captured.run(lambda: self._forwards[call.unit](*args, **kwargs))
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(
                f"what unit '{call.unit}' of another stage returns cannot be told",
                why=f"run without values it fails: {lines[0]}",
                fix="make a plan of one stage for this model",
            ) from error
        leaves, structure = tree_flatten(outputs)
        looks = (Look(t.shape, t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves)
        return Returned(tuple(looks), structure)

    def _without_values(self, value: Any) -> Any:
        value = cast(value, self._dtype)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._mode.from_tensor(value)
        return value


def has_no_values(value: Any) -> bool:
    """Whether it is a tensor that stands in for one of another stage."""
    return isinstance(value, FakeTensor)


def hand_over(call: UnitCall, returned: Returned, leaves: Sequence[Any]) -> Any:
    """Give the model what a call returned: `leaves` in the places of the looks."""
    result, collected = tree_unflatten(list(leaves), returned.structure)
    Captured(call.context).hand_over(collected)
    return result


def _look_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return value if isinstance(value, int | float | str | None) else id(value)
