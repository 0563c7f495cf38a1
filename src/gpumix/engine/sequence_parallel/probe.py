"""Rehearsal of sequence parallelism: a check that a unit's code between divided modules works on
parts of the positions, made when a unit of its kind first runs.

The unit first runs forward and backward with all positions; inputs and outputs of its regions are
recorded, with their gradients. Next the unit runs with the part of each member of the group, and
its regions replay the record. Inputs of regions, outputs and gradients of a part must be the part's
slice of the results with all positions. Regions apart, no other rank is needed.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.model.unit_values import OutputCapture, wants_gradient
from gpumix.engine.sequence_parallel.collective_regions import copy_to_region, reduce_from_region
from gpumix.hardware.host.replaced_attributes import replace_attributes

Unit = Callable[[Any, Any, Any], Any]
"""Runs a unit: given a `Call`, and positional and named arguments, returns the unit's result."""

POSITION_DIM = 1  # of positions, in hidden states of [samples, positions, width]
# Multiples of a dtype's resolution: for values, and for gradients, which are sums over positions.
VALUE_TOLERANCE_EPS, GRADIENT_TOLERANCE_EPS = 8, 32


class Call(Protocol):
    """Run of a unit, with some of the positions on this rank between regions.

    Attributes:
        length, own: number of all positions, and of positions on this rank.
    """

    length: int
    own: int

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all positions of a region's input, twice: with the full gradient on each rank, and
        with a partial gradient on each rank."""

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum of all ranks' results of a region."""


class PartMismatchError(Exception):
    """A part of the positions gives other results alone than among all positions."""


@dataclass(frozen=True)
class ProbedUnit:
    """Unit to run with a part of the positions, with its arguments.

    Args:
        run: runs the unit.
        module: the unit.
        parts: names of parameters with a partial gradient on each rank of a group, because each
            rank has a part of the positions.
        args, kwargs: arguments, with hidden states of all positions.
        hidden: index of the hidden states among the leaves of (args, kwargs).
        wants: True if the hidden states want a gradient.
    """

    run: Unit
    module: nn.Module
    parts: Sequence[str]
    args: Any
    kwargs: Any
    hidden: int
    hidden_requires_grad: bool


def check_position_split(subject: ProbedUnit, tp_group: Communicator) -> None:
    """Check that a unit can run on parts of the positions.

    Raises:
        Differs: positions cannot be divided over the group: a part's results differ.
        Exception: any error of the unit's code for unexpected shapes.
    """
    with _rehearsing(subject.module):
        captured = OutputCapture(contextvars.copy_context())
        expected = _Run(subject, tp_group)
        captured.run(expected.with_all_positions)
        if not expected.wanted:
            return
        sums: dict[str, torch.Tensor] = {}
        for member in range(tp_group.world):
            found = _Run(subject, tp_group)
            captured.run(lambda: found.with_part(expected, member))  # noqa: B023
            for name in subject.parts:
                if (gradient := found.of_parameters.get(name)) is not None:
                    sums[name] = sums[name] + gradient if name in sums else gradient.double()
        for name in subject.parts:
            if (gradient := expected.of_parameters.get(name)) is not None:
                found_sum = sums.get(name, torch.zeros_like(gradient))
                _compare(found_sum, gradient, f"the gradient of '{name}'", GRADIENT_TOLERANCE_EPS)


class _Run:
    """Forward and backward of a unit, with all positions or a part.

    Attributes:
        wanted: True if anything has a gradient.
        of_parameters: gradients of the subject's `parts`, by name.
    """

    def __init__(self, subject: ProbedUnit, tp_group: Communicator) -> None:
        self._subject, self._tp_group = subject, tp_group
        leaves, self._structure = tree_flatten((subject.args, subject.kwargs))
        self._given: list[Any] = [_leaf(value) for value in leaves]
        if subject.hidden_requires_grad:
            self.hidden.requires_grad_()
        self.outputs: list[Any] = []
        self.of_inputs: list[torch.Tensor | None] = []
        self.of_parameters: dict[str, torch.Tensor] = {}
        self.wanted = False

    def with_all_positions(self) -> None:
        self.call = _Recording(self._tp_group, self._length)
        self._run(self.call)
        ends = [_like_noise(value) for value in self.outputs]
        self._backward([(value, end) for value, end in zip(self.outputs, ends) if end is not None])
        self.ends = ends

    def with_part(self, expected: _Run, member: int) -> None:
        """Run with the part of one member.

        Raises:
            Differs: a result is not the member's part of the `expected` result.
        """
        call = _Replay(expected.call, self._tp_group.world, member)
        place = self._subject.hidden
        self._given[place] = _leaf(call.part(self._given[place].detach()), self._given[place])
        self._run(call)
        if len(self.outputs) != len(expected.outputs):
            raise PartMismatchError("it returns something else")
        ends = []
        whole = expected.hidden.shape
        for one, other, end in zip(self.outputs, expected.outputs, expected.ends):
            if not isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor):
                continue
            divided = other.shape == whole and one.shape == self.hidden.shape
            _compare(one, call.part(other) if divided else other, "what it returns")
            if end is not None and one.requires_grad:
                ends.append((one, call.part(end) if divided else end))
        self._backward(ends)
        for number, (one, other) in enumerate(zip(self.of_inputs, expected.of_inputs)):
            if other is not None or one is not None:
                like = call.part(other) if number == place and other is not None else other
                _compare_gradients(one, like, "an input")
        call.compare_gradients()

    @property
    def hidden(self) -> torch.Tensor:
        value: torch.Tensor = self._given[self._subject.hidden]
        return value

    @property
    def _length(self) -> int:
        return self.hidden.shape[POSITION_DIM]

    def _run(self, call: Call) -> None:
        args, kwargs = tree_unflatten(self._given, self._structure)
        self.outputs = tree_leaves(self._subject.run(call, args, kwargs))

    def _backward(self, ends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        named = dict(self._subject.module.named_parameters())
        parameters = {name: named[name] for name in self._subject.parts if name in named}
        inputs = [value if wants_gradient(value) else None for value in self._given]
        wanted = [value for value in (*inputs, *parameters.values()) if value is not None]
        self.wanted = bool(ends and wanted)
        found: Iterator[torch.Tensor | None] = iter(())
        if self.wanted:
            values, gradients = zip(*ends)
            found = iter(torch.autograd.grad(values, wanted, gradients, allow_unused=True))
        self.of_inputs = [None if value is None else next(found, None) for value in inputs]
        for name in parameters:
            if (gradient := next(found, None)) is not None:
                self.of_parameters[name] = gradient


class _Recording:
    """Call with all positions everywhere; records the values at region boundaries."""

    def __init__(self, tp_group: Communicator, length: int) -> None:
        self.length = self.own = length
        self._tp_group = tp_group
        self.notes: list[_BoundaryRecord] = []

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        note = self._note(part)
        entered = copy_to_region(note.follow(part), self._tp_group)
        return part.view_as(part), entered

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        total = reduce_from_region(value, self._tp_group)
        note = self._note(total)
        return note.follow(total.clone())  # the unit may write into the result

    def _note(self, value: torch.Tensor) -> _BoundaryRecord:
        self.notes.append(_BoundaryRecord(value.detach().clone()))
        return self.notes[-1]


class _BoundaryRecord:
    """Recorded input or output of a region, with all positions.

    Attributes:
        gradient: the gradient that arrived, if any.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.gradient: torch.Tensor | None = None

    def follow(self, value: torch.Tensor) -> torch.Tensor:
        """Return a view of `value` whose gradient is recorded."""
        seen = value.view_as(value)
        if seen.requires_grad:
            seen.register_hook(self._keep)
        return seen

    def _keep(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient.detach().clone()


class _Replay:
    """Call with the part of one member; regions take and return recorded values."""

    def __init__(self, recording: _Recording, members: int, member: int) -> None:
        self.length = recording.length
        self._members, self._member = members, member
        self.own = len(torch.arange(self.length).tensor_split(members)[member])
        self._notes = iter(recording.notes)
        self._arrived: list[tuple[_BoundaryRecord, list[torch.Tensor]]] = []

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """Return the member's part."""
        return value.tensor_split(self._members, POSITION_DIM)[self._member]

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        note = self._next()
        _compare(part, self.part(note.value), "what goes into a divided module")
        if not (torch.is_grad_enabled() and part.requires_grad):
            return note.value, note.value
        gradient = torch.zeros_like(note.value) if note.gradient is None else note.gradient
        whole = _ReplayedInput.apply(part, note.value, None, self.part)  # type: ignore[no-untyped-call]
        entered = _ReplayedInput.apply(part, note.value, gradient, self.part)  # type: ignore[no-untyped-call]
        return whole, entered

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        note = self._next()
        if value.shape != note.value.shape:
            raise PartMismatchError(
                f"a divided module comes to {list(value.shape)}, not {list(note.value.shape)}"
            )
        part = self.part(note.value).clone()
        if not (torch.is_grad_enabled() and value.requires_grad):
            return part
        arrived: list[torch.Tensor] = []
        self._arrived.append((note, arrived))
        found: torch.Tensor = _ReplayedOutput.apply(value, part, note.gradient, arrived)  # type: ignore[no-untyped-call]
        return found

    def compare_gradients(self) -> None:
        """Compare the gradients at the ends of regions with the record."""
        for note, arrived in self._arrived:
            expected = None if note.gradient is None else self.part(note.gradient)
            found = arrived[0] if arrived else None
            _compare_gradients(found, expected, "what a divided module comes to")

    def _next(self) -> _BoundaryRecord:
        note = next(self._notes, None)
        if note is None:
            raise PartMismatchError("it uses more divided modules than with all positions")
        return note


class _ReplayedInput(torch.autograd.Function):
    """Recorded full value in place of `part`. Backward passes on the part's slice of `gradient`, if
    known, else of the arriving gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        whole: torch.Tensor,
        gradient: torch.Tensor | None,
        part_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.gradient, ctx.part_of = gradient, part_of
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, arrived: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradient = arrived if ctx.gradient is None else ctx.gradient
        return ctx.part_of(gradient).clone(), None, None, None


class _ReplayedOutput(torch.autograd.Function):
    """Recorded `part` in place of a region's result. Backward passes on the recorded `gradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        part: torch.Tensor,
        gradient: torch.Tensor | None,
        arrived: list[torch.Tensor],
    ) -> torch.Tensor:
        ctx.gradient, ctx.arrived = gradient, arrived
        return part

    @staticmethod
    def backward(ctx: Any, arrived: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        ctx.arrived.append(arrived.detach().clone())
        return ctx.gradient, None, None, None


@contextmanager
def _rehearsing(module: nn.Module) -> Iterator[None]:
    """Run without dropout and changes of buffers inside, with the unit's own gradients. Parameters
    of zeros become noise: paths behind a gate that opens later are checked now."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(replace_attributes(part, training=False))
        for parameter in module.parameters():
            if parameter.numel() and not parameter.detach().any():
                stack.callback(parameter.data.zero_)
                parameter.data.copy_(_noise(parameter))
        stack.enter_context(torch.enable_grad())
        # Hooks around the unit would see all tensors saved by its graph. Detached: a graph holding
        # its own output would never be freed.
        stack.enter_context(saved_tensors_hooks(torch.Tensor.detach, lambda value: value))
        yield


def _leaf(value: Any, like: Any = None) -> Any:
    """Return a detached copy of a tensor, requiring a gradient if `like` does."""
    if not isinstance(value, torch.Tensor):
        return value
    like = value if like is None else like
    return value.detach().clone().requires_grad_(like.requires_grad)


def _noise(like: torch.Tensor) -> torch.Tensor:
    """Return noise in the shape of a tensor, equal on every rank."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()))
    return drawn.to(like.device, like.dtype)


def _like_noise(value: Any) -> torch.Tensor | None:
    return _noise(value) if wants_gradient(value) else None


def _compare_gradients(found: torch.Tensor | None, expected: torch.Tensor | None, of: str) -> None:
    if found is None and expected is None:
        return
    if found is None:
        assert expected is not None, "one of them is there"
        found = torch.zeros_like(expected)
    if expected is None:
        expected = torch.zeros_like(found)
    _compare(found, expected, f"the gradient of {of}", GRADIENT_TOLERANCE_EPS)


def _compare(
    found: torch.Tensor, expected: torch.Tensor, what: str, rounding: int = VALUE_TOLERANCE_EPS
) -> None:
    if found.shape != expected.shape:
        raise PartMismatchError(
            f"{what} is of shape {list(found.shape)} for a part of the positions, not "
            f"{list(expected.shape)}"
        )
    difference = torch.where(found == expected, 0.0, found.double() - expected.double()).norm()
    allowed = rounding * torch.finfo(torch.float32).eps
    if expected.is_floating_point():
        allowed = rounding * torch.finfo(expected.dtype).eps
    if difference > allowed * expected.double().norm():
        raise PartMismatchError(f"{what} is not that of each position by itself")
