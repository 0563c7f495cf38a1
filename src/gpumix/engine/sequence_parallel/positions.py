"""Sequence parallelism: between divided modules of a unit, each rank of a tensor-parallel group has
a part of the positions (Korthikanti et al. 2022).

Inputs of a unit are divided, unless coming straight from another divided unit. Outputs look whole
to the model's code (`DividedHidden`), and are gathered on use. A unit's own code runs on a part of
the positions; a rehearsal checks that each position comes out as among all positions, when a unit
of its kind is first called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.cross_entropy.lazy_logits import METADATA_FUNCTIONS
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.model.rng import RankRandomness, preserve_torch_rng
from gpumix.engine.sequence_parallel.collective_regions import (
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    reduce_scatter_gradient,
    scatter_to_region,
)
from gpumix.engine.sequence_parallel.probe import (
    POSITION_DIM,
    Call,
    ProbedUnit,
    check_position_split,
)
from gpumix.schema.errors import get_first_line

Forward = Callable[..., Any]
DISABLE_SEQUENCE_FIX = "make a plan without: `techniques: {sequence_parallel: false}`"


class DividedHidden(torch.Tensor):
    """Hidden states of which this rank has a part of the positions. The model's code sees whole
    hidden states: any use except of shape, dtype and the like gathers all positions.

    To the engine, a structure around the part, which crosses boundaries like any tensor.

    Args:
        part: this rank's part.
        length: number of all positions.
    """

    part: torch.Tensor
    positions: PositionSharding
    length: int
    _whole: dict[bool, tuple[torch.Tensor, int]]

    @staticmethod
    def __new__(
        cls: type[DividedHidden], part: torch.Tensor, positions: PositionSharding, length: int
    ) -> DividedHidden:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*part.shape[:POSITION_DIM], length, *part.shape[POSITION_DIM + 1 :]),
            dtype=part.dtype,
            device=part.device,
            requires_grad=part.requires_grad,
        )
        self.part, self.positions, self.length, self._whole = part, positions, length, {}
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Divided(size={tuple(self.shape)}, dtype={self.dtype})"

    def whole(self) -> torch.Tensor:
        """Return all positions; all ranks of the group call this together."""
        gradients = torch.is_grad_enabled()
        if gradients not in self._whole:
            self.positions.left += 1
            found = self.gathered()
            self._whole[gradients] = found, found._version
        return self._whole[gradients][0]

    def written(self) -> torch.Tensor | None:
        """Return the gathered tensor if the model's code wrote into it, making the part stale."""
        for whole, version in self._whole.values():
            if whole._version != version:
                return whole
        return None

    def gathered(self) -> torch.Tensor:
        """Gather all positions, without the cache."""
        return gather_from_region(self.part, POSITION_DIM, self.positions.tp_group, self.length)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = _map_leaves(_whole, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ModelError(
            f"{func} is applied below autograd to hidden states of which each rank has a part",
            code="positions-below-autograd",
            fix=DISABLE_SEQUENCE_FIX,
        )


register_pytree_node(
    DividedHidden,
    lambda divided: ([divided.part], (divided.positions, divided.length)),
    lambda parts, context: _rebuilt(*parts, *context),
)


def _rebuilt(part: Any, positions: PositionSharding, length: int) -> Any:
    """Wrap the result of mapping a part, if still a tensor."""
    return DividedHidden(part, positions, length) if isinstance(part, torch.Tensor) else part


class _DividedCall:
    """Call of a unit with this rank's part of the positions."""

    def __init__(self, tp_group: Communicator, length: int, own: int) -> None:
        self.tp_group, self.length, self.own = tp_group, length, own

    def enter(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = gather_from_region(part, POSITION_DIM, self.tp_group, self.length)
        return whole, reduce_scatter_gradient(part, whole, POSITION_DIM, self.tp_group)

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_from_region(value, POSITION_DIM, self.tp_group)


class PositionSharding:
    """Positions of hidden states, divided over a tensor-parallel group.

    Attributes:
        entered: how often hidden states that want a gradient were divided, outside of units.
        left: how often hidden states were gathered again, outside of units.
    """

    def __init__(self, tp_group: Communicator) -> None:
        self.tp_group = tp_group
        self.entered = 0
        self.left = 0
        self._call: Call | None = None
        self._draws: RankRandomness | None = None
        self._whole: list[Any] = []  # inputs of the running unit except hidden states
        self._seen: set[tuple[str, object]] = set()

    # -- outside of units --------------------------------------------------------------------------

    def divided(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Divide the hidden states given to a unit, the first of its inputs; gather the rest."""
        leaves, structure = tree_flatten((args, kwargs), is_leaf=is_divided)
        place = next((n for n, leaf in enumerate(leaves) if _is_hidden(leaf)), None)
        if place is None:
            raise ModelError(
                f"unit '{unit}' is given no hidden states whose positions could be divided",
                code="positions-not-found",
                why="it is to be a tensor of [samples, positions, width]",
                fix=DISABLE_SEQUENCE_FIX,
            )
        for number, leaf in enumerate(leaves):
            written = leaf.written() if is_divided(leaf) else None
            leaves[number] = leaf = leaf if written is None else written
            if number != place:
                leaves[number] = _whole(leaf)
            elif not is_divided(leaf):
                self.entered += leaf.requires_grad
                leaves[number] = DividedHidden(
                    scatter_to_region(leaf, POSITION_DIM, self.tp_group),
                    self,
                    leaf.shape[POSITION_DIM],
                )
        given: tuple[Any, Any] = tree_unflatten(leaves, structure)
        return given

    # -- inside of units ---------------------------------------------------------------------------

    def make_forward(
        self, module: nn.Module, label: str, kind: str, inner: Forward, parts: Sequence[str]
    ) -> Forward:
        """Return the forward of a unit that takes `divided` hidden states and returns the like.

        Args:
            inner: the unit's own forward. Like the result it must not hold the module.
            parts: names of parameters with a partial gradient on each rank, because each rank has a
                part of the positions.
        """
        there = weakref.ref(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = _leaves((args, kwargs))
            hidden = next(leaf for leaf in leaves if is_divided(leaf))
            if self._is_new(kind, hidden, leaves):
                unit = there()
                assert unit is not None, "it is being called"
                with preserve_torch_rng(hidden.device):
                    self._rehearse(label, unit, inner, parts, (args, kwargs))
            # Each rank has positions and heads of its own, and draws for them.
            self._draws = RankRandomness(self.tp_group.rank, hidden.device)
            call = _DividedCall(self.tp_group, hidden.length, hidden.part.shape[POSITION_DIM])
            outputs = self._run(call, inner, _map_leaves(_part, (args, kwargs)))
            return _map_leaves(lambda t: self._like(hidden, t), outputs)

        return forward

    def _like(self, hidden: DividedHidden, output: Any) -> Any:
        """Wrap a unit's output as `DividedHidden` if shaped like this rank's part."""
        if not isinstance(output, torch.Tensor) or output.shape != hidden.part.shape:
            return output
        return DividedHidden(output, self, hidden.length)

    def _run(self, call: Call, inner: Forward, given: tuple[Any, Any]) -> Any:
        args, kwargs = given
        leaves = _leaves(given)
        hidden = next((n for n, leaf in enumerate(leaves) if _is_hidden(leaf)), -1)
        self._call = call
        self._whole = [leaf for n, leaf in enumerate(leaves) if n != hidden]
        try:
            return inner(*args, **kwargs)
        finally:
            self._call, self._draws, self._whole = None, None, []

    def enter(
        self, value: torch.Tensor, *, early: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Enter a region, if positions are divided: return all positions, with the full gradient on
        each rank, and again with a partial gradient on each rank; None otherwise.

        Args:
            early: True before code common to all ranks.
        """
        call = self._call
        if call is None or not _is_hidden(value) or value.shape[POSITION_DIM] != call.own:
            return None
        if any(value is other for other in self._whole):
            return None  # as many positions as a part by chance
        if early and self._draws is not None:
            self._draws.draw_alike()
        return call.enter(value)

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """Leave a region: return this rank's part of the sum of all ranks' results."""
        call = self._call
        if call is None or not _is_hidden(value) or value.shape[POSITION_DIM] != call.length:
            return reduce_from_region(value, self.tp_group)
        self.resume_separate_draws()
        return call.leave(value)

    def resume_separate_draws(self) -> None:
        """Let ranks draw apart again, after code common to all ranks."""
        if self._draws is not None:
            self._draws.draw_apart()

    # -- the first time ----------------------------------------------------------------------------

    def _is_new(self, kind: str, hidden: DividedHidden, given: Sequence[Any]) -> bool:
        """Return True if no unit of the kind has run yet with tensors of such shapes."""
        sizes = {-(-hidden.length // self.tp_group.world), hidden.length // self.tp_group.world}
        looks = tuple(
            tuple((size == hidden.length, size in sizes) for size in value.shape)
            for value in given
            if isinstance(value, torch.Tensor)
        )
        if (kind, looks) in self._seen:
            return False
        self._seen.add((kind, looks))
        return True

    def _rehearse(
        self, label: str, unit: nn.Module, inner: Forward, parts: Sequence[str], given: Any
    ) -> None:
        """Raise a ModelError if parts of the positions give other results than among all."""
        place, hidden = next((n, t) for n, t in enumerate(_leaves(given)) if is_divided(t))
        with torch.no_grad():
            args, kwargs = _map_leaves(lambda t: t.gathered() if is_divided(t) else t, given)
        subject = ProbedUnit(
            lambda call, args, kwargs: self._run(call, inner, (args, kwargs)),
            unit,
            parts,
            args,
            kwargs,
            place,
            hidden.part.requires_grad,
        )
        problem = ""
        try:
            check_position_split(subject, self.tp_group)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of a model's code for such shapes
            problem = get_first_line(error)
        refused = torch.tensor([float(bool(problem))], device=hidden.device)
        if self.tp_group.all_reduce(refused, "comparison of divided sequences").item():
            raise ModelError(
                f"the positions of unit '{label}' cannot be divided over the ranks of a "
                "tensor-parallel group",
                code="positions-not-divisible",
                why=problem or "another rank of the group says why",
                fix=DISABLE_SEQUENCE_FIX,
            )


def is_divided(value: Any) -> TypeGuard[DividedHidden]:
    """Return True if each rank of a group has a part of `value`."""
    return isinstance(value, DividedHidden)


def _is_hidden(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, DividedHidden) else value


def _part(value: Any) -> Any:
    return value.part if isinstance(value, DividedHidden) else value


def _leaves(value: Any) -> list[Any]:
    return tree_leaves(value, is_leaf=is_divided)


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    return tree_map(function, value, is_leaf=is_divided)
