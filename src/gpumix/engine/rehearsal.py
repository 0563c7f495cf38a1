"""Whether what a unit does between its divided modules can be done for parts of the positions: seen
when one of its kind runs for the first time.

The unit runs with all positions, forward and backward; what goes into its regions and comes out of
them is noted, and the gradients there. Then it runs with the part of each member of the team, whose
regions are given what was noted. What a part gives to each region and returns must be its part of
what all positions gave, and so with the gradients. That takes no other rank, regions apart.
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

from gpumix.engine.captured import Captured
from gpumix.engine.comm import Communicator
from gpumix.engine.regions import enter, leave

Unit = Callable[[Any, Any, Any], Any]
"""Runs a unit: given a `Call`, and positional and named arguments, what it returns."""

DIM = 1  # of the positions in what units hand on, [samples, positions, width]
# Times what a dtype resolves: of values, and of gradients, which are sums over positions.
ROUNDING, ROUNDING_OF_SUMS = 8, 32


class Call(Protocol):
    """A unit runs; some of its positions are here between its regions.

    Attributes:
        length: all positions, `own`: how many are here.
    """

    length: int
    own: int

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All positions of what goes into a region: of the first result all ranks come to the same
        gradient, of the second each to a summand."""

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """The part of the sum of what all ranks have come to in a region."""


class Differs(Exception):
    """A part of the positions does not come to what it does among all of them."""


@dataclass(frozen=True)
class Subject:
    """A unit that is to run with a part of the positions, and what it is given.

    Args:
        run: runs it.
        module: the unit.
        parts: its parameters of which each rank of a team comes to a summand of the gradient,
            because it has a part of the positions.
        args, kwargs: with hidden states of all positions.
        hidden: which leaf of (args, kwargs) these are.
        wants: whether they want a gradient.
    """

    run: Unit
    module: nn.Module
    parts: Sequence[str]
    args: Any
    kwargs: Any
    hidden: int
    wants: bool


def rehearse(subject: Subject, team: Communicator) -> None:
    """
    Raises:
        Differs: positions cannot be divided over the team: what a part comes to is not its part.
        Exception: whatever the unit's code says of shapes that it did not expect.
    """
    with _rehearsing(subject.module):
        captured = Captured(contextvars.copy_context())
        expected = _Run(subject, team)
        captured.run(expected.with_all_positions)
        if not expected.wanted:
            return
        sums: dict[str, torch.Tensor] = {}
        for member in range(team.world):
            found = _Run(subject, team)
            captured.run(lambda: found.with_part(expected, member))  # noqa: B023
            for name in subject.parts:
                if (gradient := found.of_parameters.get(name)) is not None:
                    sums[name] = sums[name] + gradient if name in sums else gradient.double()
        for name in subject.parts:
            if (gradient := expected.of_parameters.get(name)) is not None:
                found_sum = sums.get(name, torch.zeros_like(gradient))
                _compare(found_sum, gradient, f"the gradient of '{name}'", ROUNDING_OF_SUMS)


class _Run:
    """A unit's forward and backward, with all positions or a part.

    Attributes:
        wanted: whether anything has a gradient.
        of_parameters: gradients of the subject's `parts`, by name.
    """

    def __init__(self, subject: Subject, team: Communicator) -> None:
        self._subject, self._team = subject, team
        leaves, self._structure = tree_flatten((subject.args, subject.kwargs))
        self._given: list[Any] = [_leaf(value) for value in leaves]
        if subject.wants:
            self.hidden.requires_grad_()
        self.outputs: list[Any] = []
        self.of_inputs: list[torch.Tensor | None] = []
        self.of_parameters: dict[str, torch.Tensor] = {}
        self.wanted = False

    def with_all_positions(self) -> None:
        self.call = _Recording(self._team, self._length)
        self._run(self.call)
        ends = [_like_noise(value) for value in self.outputs]
        self._backward([(value, end) for value, end in zip(self.outputs, ends) if end is not None])
        self.ends = ends

    def with_part(self, expected: _Run, member: int) -> None:
        """
        Raises:
            Differs: it comes to something else than its part of what is `expected`.
        """
        call = _Replay(expected.call, self._team.world, member)
        place = self._subject.hidden
        self._given[place] = _leaf(call.part(self._given[place].detach()), self._given[place])
        self._run(call)
        if len(self.outputs) != len(expected.outputs):
            raise Differs("it returns something else")
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
        return self.hidden.shape[DIM]

    def _run(self, call: Call) -> None:
        args, kwargs = tree_unflatten(self._given, self._structure)
        self.outputs = tree_leaves(self._subject.run(call, args, kwargs))

    def _backward(self, ends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        named = dict(self._subject.module.named_parameters())
        parameters = {name: named[name] for name in self._subject.parts if name in named}
        inputs = [value if _has_gradient(value) else None for value in self._given]
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
    """With all positions everywhere."""

    def __init__(self, team: Communicator, length: int) -> None:
        self.length = self.own = length
        self._team = team
        self.notes: list[_Note] = []

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        note = self._note(part)
        entered = enter(note.follow(part), self._team)
        return part.view_as(part), entered

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        total = leave(value, self._team)
        note = self._note(total)
        return note.follow(total.clone())  # the unit may write into it

    def _note(self, value: torch.Tensor) -> _Note:
        self.notes.append(_Note(value.detach().clone()))
        return self.notes[-1]


class _Note:
    """What goes into a region or comes out of it, with all positions.

    Attributes:
        gradient: what arrived there, if anything did.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.gradient: torch.Tensor | None = None

    def follow(self, value: torch.Tensor) -> torch.Tensor:
        """The same; its gradient is noted."""
        seen = value.view_as(value)
        if seen.requires_grad:
            seen.register_hook(self._keep)
        return seen

    def _keep(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient.detach().clone()


class _Replay:
    """With the part of one member. Regions are given what was noted, and give what was noted."""

    def __init__(self, recording: _Recording, members: int, member: int) -> None:
        self.length = recording.length
        self._members, self._member = members, member
        self.own = len(torch.arange(self.length).tensor_split(members)[member])
        self._notes = iter(recording.notes)
        self._arrived: list[tuple[_Note, list[torch.Tensor]]] = []

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """The member's."""
        return value.tensor_split(self._members, DIM)[self._member]

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        note = self._next()
        _compare(part, self.part(note.value), "what goes into a divided module")
        if not (torch.is_grad_enabled() and part.requires_grad):
            return note.value, note.value
        gradient = torch.zeros_like(note.value) if note.gradient is None else note.gradient
        whole = _Given.apply(part, note.value, None, self.part)  # type: ignore[no-untyped-call]
        entered = _Given.apply(part, note.value, gradient, self.part)  # type: ignore[no-untyped-call]
        return whole, entered

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        note = self._next()
        if value.shape != note.value.shape:
            raise Differs(
                f"a divided module comes to {list(value.shape)}, not {list(note.value.shape)}"
            )
        part = self.part(note.value).clone()
        if not (torch.is_grad_enabled() and value.requires_grad):
            return part
        arrived: list[torch.Tensor] = []
        self._arrived.append((note, arrived))
        found: torch.Tensor = _Taken.apply(value, part, note.gradient, arrived)  # type: ignore[no-untyped-call]
        return found

    def compare_gradients(self) -> None:
        """Those that arrived where regions end."""
        for note, arrived in self._arrived:
            expected = None if note.gradient is None else self.part(note.gradient)
            found = arrived[0] if arrived else None
            _compare_gradients(found, expected, "what a divided module comes to")

    def _next(self) -> _Note:
        note = next(self._notes, None)
        if note is None:
            raise Differs("it uses more divided modules than with all positions")
        return note


class _Given(torch.autograd.Function):
    """All positions of `part`, as noted. It gets its part of the gradient: of `gradient`, if that
    is known, whatever arrives."""

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


class _Taken(torch.autograd.Function):
    """`part`, as noted, of what a region comes to; that gets the `gradient` that was noted."""

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
    """Inside nothing is dropped, no buffer changes, and gradients are those of the unit as it is,
    but that parameters of zeros are not: what a gate lets by later is to be seen now."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.callback(setattr, part, "training", part.training)
            part.training = False
        for parameter in module.parameters():
            if parameter.numel() and not parameter.detach().any():
                stack.callback(parameter.data.zero_)
                parameter.data.copy_(_noise(parameter))
        stack.enter_context(torch.enable_grad())
        # Whoever runs the unit may look at all that its graph saves. Detached: a graph that holds
        # its own output would never be freed.
        stack.enter_context(saved_tensors_hooks(torch.Tensor.detach, lambda value: value))
        yield


def _leaf(value: Any, like: Any = None) -> Any:
    """A tensor of its own without a past, which wants a gradient if `like` does."""
    if not isinstance(value, torch.Tensor):
        return value
    like = value if like is None else like
    return value.detach().clone().requires_grad_(like.requires_grad)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _noise(like: torch.Tensor) -> torch.Tensor:
    """The same on every rank."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()))
    return drawn.to(like.device, like.dtype)


def _like_noise(value: Any) -> torch.Tensor | None:
    return _noise(value) if _has_gradient(value) else None


def _compare_gradients(found: torch.Tensor | None, expected: torch.Tensor | None, of: str) -> None:
    if found is None and expected is None:
        return
    if found is None:
        assert expected is not None, "one of them is there"
        found = torch.zeros_like(expected)
    if expected is None:
        expected = torch.zeros_like(found)
    _compare(found, expected, f"the gradient of {of}", ROUNDING_OF_SUMS)


def _compare(
    found: torch.Tensor, expected: torch.Tensor, what: str, rounding: int = ROUNDING
) -> None:
    if found.shape != expected.shape:
        raise Differs(
            f"{what} is of shape {list(found.shape)} for a part of the positions, not "
            f"{list(expected.shape)}"
        )
    difference = torch.where(found == expected, 0.0, found.double() - expected.double()).norm()
    allowed = rounding * torch.finfo(torch.float32).eps
    if expected.is_floating_point():
        allowed = rounding * torch.finfo(expected.dtype).eps
    if difference > allowed * expected.double().norm():
        raise Differs(f"{what} is not that of each position by itself")
