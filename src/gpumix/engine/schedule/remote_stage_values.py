"""Placeholders for parameters and units of other pipeline stages.

A stage runs the model's own forward up to its last unit call, and so reaches code and calls of
other stages. These see PyTorch's fake tensors, which have a shape but no values, take no memory and
almost no time, and yield fake tensors. Values that a stage needs from earlier stages replace fake
tensors, as the plan says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from gpumix.engine.model.forward_coroutine import ModelError, UnitCall
from gpumix.engine.model.unit_values import (
    ArgumentsStructure,
    Containers,
    OutputCapture,
    Structure,
    take_apart,
)
from gpumix.engine.quantised.quantised_parameter import (
    ModuleAttribute,
    ModuleParameter,
    QuantisedParameter,
    WeightFormat,
    restore_module_parameter,
)
from gpumix.engine.sharding.unit_discovery import ModelUnits, ParameterSlot
from gpumix.engine.unit.unit_call import cast_floating
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.schema.errors import get_first_line

VALUE_DEPENDENCE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of code that depends on values of fake tensors."""

FILL_OPS = ("zeros_like", "ones_like", "full_like", "empty_like",
         "new_zeros", "new_ones", "new_full", "new_empty")  # fmt: skip
"""Operations that use a tensor's shape, dtype or device, but not its values."""


class UnknownOutputError(ModelError):
    """The results of another stage's unit are unknown without values."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor returned by a call."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        return cls(tensor.shape, tensor.dtype)


@dataclass(frozen=True)
class ParameterMeta(TensorMeta):
    """Shape and dtype of a parameter in computations, and its format if it is packed."""

    format: WeightFormat | None = None


Make = Callable[[TensorMeta], torch.Tensor]
Held = list[tuple[dict[str, Any], str, Any]]


@dataclass(frozen=True)
class Returned:
    """Results of a unit call, and values collected in addition: tensors or looks."""

    leaves: tuple[Any, ...]
    structure: Structure

    def look(self, output: int) -> TensorMeta:
        """Return the look of the tensor at place `output`."""
        found = self.leaves[output]
        assert isinstance(found, TensorMeta), "the plan takes a tensor"
        return found


class _StageFakeTensorMode(FakeTensorMode):
    """Mode of tensors without values; tensors filled in the likeness of a fake tensor are real."""

    _fills = frozenset(getattr(torch.ops.aten, name).default for name in FILL_OPS)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._fills:
            one = torch.empty((), dtype=args[0].dtype, device=args[0].device)
            return func(one.expand(args[0].shape), *args[1:], **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class RemoteStages:
    """Units and parameters of other pipeline stages.

    Args:
        anatomy: of the full model; its units' own forward must not be replaced yet.
        dtype: dtype of floating parameters in computations here.
        undivided: context in which modules are those of a single rank.
    """

    def __init__(
        self,
        anatomy: ModelUnits,
        device: torch.device,
        dtype: torch.dtype,
        undivided: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._undivided = undivided
        self._mode = _StageFakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._dtype = dtype
        # Not the slots: their references to the model's parameters must be released with them.
        self._places = [(self._look(s), s.places) for unit in anatomy.all for s in unit.slots]
        self._modules = {unit.name: unit.module for unit in anatomy.units}
        self._forwards: dict[str, Callable[..., Any]] = {
            unit.name: unit.module.forward for unit in anatomy.units
        }
        self._returned: dict[object, Returned] = {}

    def install(self, slots: Sequence[ParameterSlot]) -> None:
        """Replace parameters of slots permanently by parameters without values."""
        for slot in slots:
            self._put(self._look(slot), slot.places, self.tensor)

    def _look(self, slot: ParameterSlot) -> ParameterMeta:
        """Return the look of a parameter in computations here."""
        old = slot.parameter
        dtype = self._dtype if old.is_floating_point() else old.dtype
        form = old.format if isinstance(old, QuantisedParameter) else None
        return ParameterMeta(old.shape, dtype, form)

    def _put(
        self, look: ParameterMeta, places: Sequence[tuple[nn.Module, str]], make: Make
    ) -> Held:
        """Put a parameter with a look in places of modules, and return what was there."""
        if look.format is None:
            shown = ModuleParameter(nn.Parameter(make(look), requires_grad=False))
        else:
            shown = restore_module_parameter(
                look.format, make(look), [module for module, _ in places]
            )
        new = [
            ModuleAttribute(module._parameters, name, shown.parameter) for module, name in places
        ]
        new += shown.attributes
        held = [(one.holder, one.key, one.holder.get(one.key)) for one in new]
        for one in new:
            one.holder[one.key] = one.value
        return held

    @contextmanager
    def _installed(self, unit: str, make: Make) -> Iterator[None]:
        inside = set(self._modules[unit].modules())
        held = [
            one
            for look, every in self._places
            if (places := [place for place in every if place[0] in inside])
            for one in self._put(look, places, make)
        ]
        try:
            yield
        finally:
            for holder, name, value in held:
                holder[name] = value

    def tensor(self, look: TensorMeta) -> torch.Tensor:
        """Make a tensor without values."""
        with self._mode:
            return torch.empty(look.shape, dtype=look.dtype, device=self._device)

    def returned(self, call: UnitCall) -> Returned:
        """Compute the results of another stage's unit without values.

        Raises:
            Untold: the results depend on values.
        """
        inputs, structure = ArgumentsStructure.of(call.args, call.kwargs)
        # By unit, not by kind: a block's results may depend on its number.
        key = (call.unit, str(structure), tuple(map(_look_of, inputs)))
        if key not in self._returned:
            with self._undivided():
                self._returned[key] = self._tried(call)
        return self._returned[key]

    def _tried(self, call: UnitCall) -> Returned:
        try:
            with self._installed(call.unit, self.tensor), _unlogged():
                returned = run_without_gradients(
                    call, self._forwards[call.unit], self._without_values
                )
        except Exception:  # it depends on values, or a kernel requires values
            returned = self._computed(call)
            _refuse_numbers(call.unit, returned)
        looks = (TensorMeta.of(t) if isinstance(t, torch.Tensor) else t for t in returned.leaves)
        return Returned(tuple(looks), returned.structure)

    def _computed(self, call: UnitCall) -> Returned:
        """Compute results with zeros for parameters and for inputs without values."""
        try:
            with self._installed(call.unit, self.zeros):
                return run_without_gradients(call, self._forwards[call.unit], self._with_values)
        except Exception as error:
            raise _make_unknown_output_error(
                call.unit, f"run on zeros it fails: {get_first_line(error)}"
            ) from error

    def zeros(self, look: TensorMeta) -> torch.Tensor:
        """Make a tensor of zeros."""
        return torch.zeros(look.shape, dtype=look.dtype, device=self._device)

    def _without_values(self, value: Any) -> Any:
        value = cast_floating(value, self._dtype)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._mode.from_tensor(value)
        return value

    def _with_values(self, value: Any) -> Any:
        value = cast_floating(value, self._dtype)
        return self.zeros(TensorMeta.of(value)) if isinstance(value, FakeTensor) else value


def _unlogged() -> AbstractContextManager[None]:
    """Suppress torch's error logs about operations that need values."""
    return replace_attributes(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)


def _refuse_numbers(unit: str, returned: Returned) -> None:
    """Raise an Untold if results of a unit contain numbers, which may come from zeros."""
    if any(isinstance(leaf, int | float | complex) for leaf in returned.leaves):
        raise _make_unknown_output_error(
            unit, "it goes by values, and a number is among what it returns"
        )


def _make_unknown_output_error(unit: str, why: str) -> UnknownOutputError:
    return UnknownOutputError(
        f"what unit '{unit}' returns cannot be told by another stage",
        code="remote-output-unknown",
        why=why,
        fix="make a plan of one stage for this model",
    )


def refuse_without_values(value: torch.Tensor, what: str) -> None:
    """Raise a ModelError if a tensor needed on all ranks has no values here.

    Args:
        what: its name.
    """
    if isinstance(value, FakeTensor):
        raise ModelError(
            f"the {what} is computed from what another stage has and the plan does not take",
            code="remote-value-not-taken",
            why="the model's code went another way when it was profiled",
            fix="profile and plan again for this model, or make a plan of one stage",
        )


def run_without_gradients(
    call: UnitCall, forward: Callable[..., Any], prepared: Callable[[Any], Any]
) -> Returned:
    """Run a unit's `forward` without gradients, on inputs converted by `prepared`."""
    inputs, arguments, captured = take_apart(call.unit, call.args, call.kwargs, call.context)
    with call.state.applied(), torch.no_grad():
        given = [prepared(value) for value in inputs]
        leaves, structure = captured.run_unit(call.unit, forward, arguments, given)
    return Returned(tuple(leaves), structure)


def hand_over(call: UnitCall, returned: Returned, leaves: Sequence[Any]) -> Any:
    """Return a call's results to the model, with `leaves` in place of the looks."""
    captured = OutputCapture(call.context, Containers(call.unit, call.args, call.kwargs))
    return captured.hand_over(leaves, returned.structure)


def make_input_shape_key(call: UnitCall) -> object:
    """Return a key of a call's tensors: number, shapes and dtypes."""
    inputs, structure = ArgumentsStructure.of(call.args, call.kwargs)
    return str(structure), tuple(TensorMeta.of(t) for t in inputs if isinstance(t, torch.Tensor))


def _look_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return value if isinstance(value, int | float | str | None) else id(value)
