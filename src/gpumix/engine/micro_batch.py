"""One micro-batch on its way through the model, from unit call to unit call and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gpumix.engine.boundary import Cut
from gpumix.engine.coroutine import Coroutine, Finished, ModelError, UnitCall
from gpumix.engine.glue import Glue
from gpumix.engine.host import HostStore
from gpumix.engine.parts import ShardedUnit
from gpumix.engine.randomness import Randomness

Loss = tuple[torch.Tensor, torch.Tensor]


class MicroBatch:
    """One micro-batch that stops at every unit.

    Args:
        compute_loss: runs the model and returns (summed loss, count).
        calls: names of the units in the order in which the model must call them.
        keeps: whether the graph of a unit call is kept, by its number; else it is recomputed.
        host: where what calls are recomputed from is kept; None: on the device.
    """

    def __init__(
        self,
        compute_loss: Callable[[], Loss],
        *,
        calls: Sequence[str],
        randomness: Randomness,
        compute_dtype: torch.dtype,
        keeps: Callable[[int], bool],
        host: HostStore | None = None,
    ) -> None:
        self._coroutine = Coroutine(compute_loss)
        self._calls = calls
        self._randomness = randomness
        self._dtype = compute_dtype
        self._keeps = keeps
        self._host = host
        self._glue = Glue()
        self._cuts: list[Cut | None] = []
        self._at: UnitCall | Finished | None = None
        self._outputs: Any = None

    def start(self) -> None:
        """Run the code before the first unit."""
        self._resume(0)

    def forward(self, number: int, unit: ShardedUnit, *, keep: bool) -> None:
        """Run unit call `number`; `keep` what its backward needs."""
        call = self._at
        if not isinstance(call, UnitCall) or call.unit != unit.name:
            raise out_of_order(self._calls, number, call.unit if isinstance(call, UnitCall) else "")
        cut = Cut(
            call,
            unit,
            compute_dtype=self._dtype,
            seed=partial(self._randomness.start, 2 * number + 1),
            recompute=not self._keeps(number),
            host=self._host,
        )
        self._at = None
        self._outputs = cut.forward()
        if keep:
            self._cuts.append(cut if cut.differentiable else None)
            self._glue.used(number, cut.links)

    def resume(self, number: int) -> None:
        """Go on after unit call `number` to the next unit call, or to the end."""
        outputs, self._outputs = self._outputs, None
        self._resume(2 * number + 2, outputs)

    def finish(self) -> Loss:
        """(summed loss, count) of a micro-batch that has come to its end."""
        if not isinstance(self._at, Finished):
            assert self._at is not None
            raise out_of_order(self._calls, len(self._calls), self._at.unit)
        loss, count = self._at.value
        self._at = None
        return loss, count

    def backward_loss(self, loss: torch.Tensor) -> None:
        """Backward from the loss to the last unit's outputs."""
        refuse_detached(loss)
        self._glue.backward_loss(loss)

    def prefetch(self, number: int) -> None:
        """Backward through unit call `number` comes soon."""
        cut = self._cuts[number]
        if cut is not None:
            cut.prefetch()

    def backward(self, number: int) -> None:
        """Backward through unit call `number` and the code before it."""
        cut, self._cuts[number] = self._cuts[number], None
        if cut is not None:
            self._glue.backward(number, cut.links, cut.backward())

    def close(self) -> None:
        self._coroutine.close()

    def _resume(self, stretch: int, value: Any = None) -> None:
        self._randomness.start(stretch)
        self._at = self._coroutine.resume(value)


def refuse_detached(loss: torch.Tensor) -> None:
    """Raise a ModelError if there is nothing to differentiate."""
    if not loss.requires_grad:
        raise ModelError(
            "the loss does not depend on any parameter that is trained",
            fix="compute it with gradients: no `torch.no_grad()` or `.detach()` on the way, "
            "and `requires_grad` where you want to train",
        )


def out_of_order(calls: Sequence[str], number: int, called: str) -> ModelError:
    """The error of a model that makes another unit call than the plan's: `called` ("" for none) as
    call `number`, counted from 0."""
    wanted = (
        f"unit '{calls[number]}' was to be called"
        if number < len(calls)
        else ("the loss was to come")
    )
    return ModelError(
        f"the model calls its units in another order than the plan: {wanted} as call "
        f"{number + 1} of {len(calls)}, the model called '{called or 'none'}'",
        why="the order of unit calls must be the same on every rank and in every step",
        fix="profile and plan again for this model and its current settings",
    )
