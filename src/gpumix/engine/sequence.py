"""Sequence parallelism: between the divided modules of a unit each rank of a team has its part of
the positions (Korthikanti et al. 2022).

What goes into such a unit is divided there, unless it comes straight from another one; what comes
out looks whole to the model's code (`Divided`), and becomes so where that does anything with it. A
unit's own code runs on a part of the positions: that each of them comes out as if all were there is
seen when a unit of its kind is called for the first time.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from gpumix.engine.comm import Communicator
from gpumix.engine.coroutine import ModelError
from gpumix.engine.lazy_logits import ANSWERED
from gpumix.engine.randomness import apart, untouched
from gpumix.engine.regions import enter_together, leave, leave_apart, part_of, side_by_side

Forward = Callable[..., Any]
DIM = 1  # of the positions in what units hand on, [samples, positions, width]
ROUNDING = 8  # times what a dtype resolves
WITHOUT = "make a plan without: `techniques: {sequence: false}`"


class Divided(torch.Tensor):
    """Hidden states of which this rank has a part of the positions. To the model's code they are
    whole: asked for anything but their looks, they are gathered.

    To the engine it is a structure around the part, which crosses boundaries like any tensor.

    Args:
        part: what this rank has.
        length: positions of the whole.
    """

    part: torch.Tensor
    positions: Positions
    length: int
    _whole: dict[bool, torch.Tensor]

    @staticmethod
    def __new__(
        cls: type[Divided], part: torch.Tensor, positions: Positions, length: int
    ) -> Divided:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*part.shape[:DIM], length, *part.shape[DIM + 1 :]),
            dtype=part.dtype,
            device=part.device,
            requires_grad=part.requires_grad,
        )
        self.part, self.positions, self.length, self._whole = part, positions, length, {}
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Divided(size={tuple(self.shape)}, dtype={self.dtype})"

    def whole(self) -> torch.Tensor:
        """All positions; all ranks of the team ask for them."""
        gradients = torch.is_grad_enabled()
        if gradients not in self._whole:
            self.positions.left += 1
            self._whole[gradients] = self.gathered()
        return self._whole[gradients]

    def gathered(self) -> torch.Tensor:
        """The same, anew."""
        return side_by_side(self.part, DIM, self.positions.team, self.length)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = _mapped(_whole, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ModelError(
            f"{func} is applied below autograd to hidden states of which each rank has a part",
            fix=WITHOUT,
        )


register_pytree_node(
    Divided,
    lambda divided: ([divided.part], (divided.positions, divided.length)),
    lambda parts, context: _rebuilt(*parts, *context),
)


def _rebuilt(part: Any, positions: Positions, length: int) -> Any:
    """Of what was made of the part: not always a tensor."""
    return Divided(part, positions, length) if isinstance(part, torch.Tensor) else part


class _Call:
    """A unit runs, with so many positions.

    Attributes:
        own: how many of them are computed here between its regions.
    """

    def __init__(self, team: Communicator, length: int, own: int) -> None:
        self.team, self.length, self.own = team, length, own

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Positions.enter`."""
        whole = side_by_side(part, DIM, self.team, self.length)
        return whole, enter_together(part, whole, DIM, self.team)

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """See `Positions.leave`."""
        return leave_apart(value, DIM, self.team)


class _Recording(_Call):
    """With all positions everywhere. What goes into regions and what comes out is noted."""

    def __init__(self, team: Communicator, length: int) -> None:
        super().__init__(team, length, length)
        self.values: list[torch.Tensor] = []

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.values.append(part)
        return part, part

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        self.values.append(leave(value, self.team))
        return self.values[-1].clone()  # the unit may write into it


class _Replay(_Call):
    """With the part of one member. Regions give what was noted, whatever they come to."""

    def __init__(self, recording: _Recording, member: int) -> None:
        own = torch.arange(recording.length).tensor_split(recording.team.world)[member]
        super().__init__(recording.team, recording.length, len(own))
        self._member = member
        self._values = iter(recording.values)

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """The member's."""
        return value.tensor_split(self.team.world, DIM)[self._member]

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = self._next()
        _compare(part, self.part(whole), "what goes into a divided module")
        return whole, whole

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        return self.part(self._next())

    def _next(self) -> torch.Tensor:
        value = next(self._values, None)
        if value is None:
            raise _Differs("it uses more divided modules than with all positions")
        return value


class _Differs(Exception):
    """A part of the positions does not come to what it does among all of them."""


class Positions:
    """The positions of hidden states, divided over a team.

    Attributes:
        entered: how often hidden states that want a gradient were divided, `left`: how often they
            became whole again, both outside of units.
    """

    def __init__(self, team: Communicator) -> None:
        self.team = team
        self.entered = 0
        self.left = 0
        self._call: _Call | None = None
        self._seen: set[str] = set()

    # -- outside of units --------------------------------------------------------------------------

    def divided(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a unit is given: the first of it, hidden states, divided, all else whole."""
        leaves, structure = tree_flatten((args, kwargs), is_leaf=is_divided)
        place = next((n for n, leaf in enumerate(leaves) if _is_hidden(leaf)), None)
        if place is None:
            raise ModelError(
                f"unit '{unit}' is given no hidden states whose positions could be divided",
                why="it is to be a tensor of [samples, positions, width]",
                fix=WITHOUT,
            )
        for number, leaf in enumerate(leaves):
            if number != place:
                leaves[number] = leaf.whole() if is_divided(leaf) else leaf
            elif not is_divided(leaf):
                self.entered += leaf.requires_grad
                leaves[number] = Divided(part_of(leaf, DIM, self.team), self, leaf.shape[DIM])
        given: tuple[Any, Any] = tree_unflatten(leaves, structure)
        return given

    # -- inside of them ----------------------------------------------------------------------------

    def forward_of(self, module: nn.Module, label: str, kind: str, inner: Forward) -> Forward:
        """That of a unit, which is given `divided` hidden states, and gives such.

        Args:
            inner: does what it does. Like what is returned it must not hold the module.
        """
        there = weakref.ref(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = next(leaf for leaf in _leaves((args, kwargs)) if is_divided(leaf))
            if kind not in self._seen:
                self._seen.add(kind)
                with _evaluating(there()), untouched(hidden.device):
                    contextvars.Context().run(self._check, label, inner, args, kwargs)
            if self.team.rank:  # each has positions and heads of its own, and draws for them
                apart(self.team.rank, hidden.device)
            call = _Call(self.team, hidden.length, hidden.part.shape[DIM])
            outputs = self._run(call, inner, _mapped(_part, (args, kwargs)))
            return _mapped(lambda t: self._like(hidden, t), outputs)

        return forward

    def _like(self, hidden: Divided, output: Any) -> Any:
        """What a unit returns: of the shape of its part of hidden states, it is such a part."""
        if not isinstance(output, torch.Tensor) or output.shape != hidden.part.shape:
            return output
        return Divided(output, self, hidden.length)

    def _run(self, call: _Call, inner: Forward, given: tuple[Any, Any]) -> Any:
        args, kwargs = given
        self._call = call
        try:
            return inner(*args, **kwargs)
        finally:
            self._call = None

    def enter(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What goes into a region, if its positions are divided: all of them, of which each rank
        comes to the whole gradient; and the same, of which each comes to a part."""
        call = self._call
        if call is None or not _is_hidden(value) or value.shape[DIM] != call.own:
            return None
        return call.enter(value)

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have come to in a region, of which each has its part."""
        call = self._call
        if call is None or not _is_hidden(value) or value.shape[DIM] != call.length:
            return leave(value, self.team)
        return call.leave(value)

    # -- the first time ----------------------------------------------------------------------------

    @torch.no_grad()
    def _check(self, label: str, inner: Forward, args: Any, kwargs: Any) -> None:
        """Raise a ModelError if parts of the positions do not come to what they do among all of
        them: regions apart, that can be seen on one rank."""
        whole = next(leaf for leaf in _leaves((args, kwargs)) if is_divided(leaf)).gathered()
        recording = _Recording(self.team, whole.shape[DIM])

        def given(hidden: torch.Tensor) -> tuple[Any, Any]:
            return _mapped(lambda t: hidden if is_divided(t) else t, (args, kwargs))

        expected = self._run(recording, inner, given(whole))
        # Of a team that is made up nobody else will see to its part.
        alone = self.team.group is None
        problem = ""
        for member in range(self.team.world) if alone else (self.team.rank,):
            replay = _Replay(recording, member)
            try:
                found = self._run(replay, inner, given(replay.part(whole)))
                for one, other in zip(_leaves(found), _leaves(expected), strict=True):
                    if isinstance(other, torch.Tensor):
                        like = other if one.shape == other.shape else replay.part(other)
                        _compare(one, like, "what it returns")
            except Exception as error:  # whatever a model's code says of such shapes
                problem = problem or (str(error).strip() or type(error).__name__).splitlines()[0]
        refused = torch.tensor([float(bool(problem))], device=whole.device)
        if self.team.all_reduce(refused, "comparison of divided sequences").item():
            raise ModelError(
                f"the positions of unit '{label}' cannot be divided over the ranks of a team",
                why=problem or "another rank of the team says why",
                fix=WITHOUT,
            )


@contextmanager
def _evaluating(module: nn.Module | None) -> Iterator[None]:
    """Inside nothing is dropped, and no buffer changes."""
    assert module is not None, "it is being called"
    held = [(part, part.training) for part in module.modules()]
    for part, _ in held:
        part.training = False
    try:
        yield
    finally:
        for part, training in held:
            part.training = training


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if found.shape != expected.shape:
        raise _Differs(
            f"{what} is of shape {list(found.shape)} for a part of the positions, not "
            f"{list(expected.shape)}"
        )
    difference = torch.where(found == expected, 0.0, found.double() - expected.double()).norm()
    allowed = ROUNDING * torch.finfo(torch.float32).eps
    if expected.is_floating_point():
        allowed = ROUNDING * torch.finfo(expected.dtype).eps
    if difference > allowed * expected.double().norm():
        raise _Differs(f"{what} is not computed for each position by itself")


def is_divided(value: Any) -> TypeGuard[Divided]:
    """Whether of this each rank of a team has a part."""
    return isinstance(value, Divided)


def _is_hidden(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Divided) else value


def _part(value: Any) -> Any:
    return value.part if isinstance(value, Divided) else value


def _leaves(value: Any) -> list[Any]:
    return tree_leaves(value, is_leaf=is_divided)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    return tree_map(function, value, is_leaf=is_divided)
