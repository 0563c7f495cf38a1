"""Inputs and outputs of a unit's tensor-parallel modules, by parent, because modules of a parent
take equal tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.sequence_parallel.collective_regions import copy_to_region, reduce_from_region
from gpumix.engine.sequence_parallel.positions import PositionSharding

Forward = Callable[..., Any]


class RegionBoundary:
    """Inputs of the tensor-parallel modules of one parent, where a region begins. A tensor taken by
    several modules enters once, and its gradient is summed once.

    Args:
        shared: whether entered tensors are remembered until `forget`.
        positions: division of positions outside of the region, if any.
        early: whether the parent gets all positions, not its modules one by one.
    """

    def __init__(
        self,
        tp_group: Communicator,
        *,
        shared: bool,
        positions: PositionSharding | None = None,
        early: bool = False,
    ) -> None:
        self._tp_group = tp_group
        self.shared = shared
        self._positions = positions
        self._early = early
        self._known: list[tuple[torch.Tensor, torch.Tensor]] = []

    def given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the parent's arguments, with all positions of the first tensor."""
        if self._positions is None or not self._early:
            return args, kwargs
        leaves, structure = tree_flatten((args, kwargs))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if (found := self._positions.enter(leaf, early=True)) is not None:
                    leaves[number] = found[0]
                    self._known.append(found)
                break
        whole: tuple[Any, Any] = tree_unflatten(leaves, structure)
        return whole

    def enter(self, value: torch.Tensor) -> torch.Tensor:
        if not self.shared:
            return copy_to_region(value, self._tp_group)
        for known, entered in self._known:
            if known is value:
                return entered
        self._known.append((value, self._entered(value)))
        return self._known[-1][1]

    def _entered(self, value: torch.Tensor) -> torch.Tensor:
        found = None
        if self._positions is not None and not self._early:
            found = self._positions.enter(value)
        return copy_to_region(value, self._tp_group) if found is None else found[1]

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """Reduce the output of a region, of which each rank has a summand."""
        return (
            reduce_from_region(value, self._tp_group)
            if self._positions is None
            else self._positions.leave(value)
        )

    def forget(self) -> None:
        self._known.clear()
        if self._positions is not None and self._early:
            self._positions.resume_separate_draws()


def wrap_parent_forward(inner: Forward, entrances: RegionBoundary) -> Forward:
    """Return the forward of a parent with arguments from `entrances`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = entrances.given(args, kwargs)
            return inner(*args, **kwargs)
        finally:
            entrances.forget()

    return forward
