"""The layered schedule: unit k of every micro-batch, then unit k + 1 of any.

Each unit is gathered once per pass and its gradient reduced once per step, however many
micro-batches a rank runs. So ranks with different numbers and sizes of micro-batches, also with
none, issue exactly the same collectives: 2 all-gathers and 1 reduction per unit (the root, which is
in use throughout, is gathered once).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpumix.engine.boundary import Cut
from gpumix.engine.coroutine import Coroutine, Finished, ModelError, UnitCall
from gpumix.engine.glue import Glue
from gpumix.engine.head import HeadInChunks
from gpumix.engine.randomness import Randomness
from gpumix.engine.record import Record
from gpumix.engine.shards import ShardedUnit
from gpumix.spec.profile import ROOT


@dataclass(frozen=True)
class Parts:
    """A sharded model: its units by name, the root unit, and the order of the unit calls."""

    units: dict[str, ShardedUnit]
    root: ShardedUnit
    calls: tuple[str, ...]
    head: HeadInChunks | None = None  # None: logits are made whole

    @property
    def all(self) -> tuple[ShardedUnit, ...]:
        return (self.root, *self.units.values())

    @property
    def record(self) -> Record:
        """Who is told of what is done."""
        return self.root.comm.record

    def call(self, number: int) -> ShardedUnit:
        return self.units[self.calls[number]]


class MicroBatch:
    """One micro-batch on its way through the model.

    Args:
        compute_loss: runs the model and returns (summed loss, count).
        calls: names of the units in the order in which the model must call them.
    """

    def __init__(
        self,
        compute_loss: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        *,
        calls: Sequence[str],
        randomness: Randomness,
        compute_dtype: torch.dtype,
    ) -> None:
        self._coroutine = Coroutine(compute_loss)
        self._calls = calls
        self._randomness = randomness
        self._dtype = compute_dtype
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
            raise self._out_of_order(number, unit.name)
        cut = Cut(
            call,
            unit,
            compute_dtype=self._dtype,
            seed=partial(self._randomness.start, 2 * number + 1),
        )
        self._at = None
        self._outputs = cut.forward()
        if keep:
            self._cuts.append(cut if cut.differentiable else None)
            self._glue.used(number, cut.inputs)

    def resume(self, number: int) -> None:
        """Go on after unit call `number` to the next unit call, or to the end."""
        outputs, self._outputs = self._outputs, None
        self._resume(2 * number + 2, outputs)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(summed loss, count) of a micro-batch that has come to its end."""
        if not isinstance(self._at, Finished):
            raise self._out_of_order(len(self._calls), "")
        loss, count = self._at.value
        self._at = None
        return loss, count

    def backward_loss(self, loss: torch.Tensor) -> None:
        """Backward from the loss to the last unit's outputs."""
        if not loss.requires_grad:
            raise ModelError(
                "the loss does not depend on any parameter that is trained",
                fix="compute it with gradients: no `torch.no_grad()` or `.detach()` on the way, "
                "and `requires_grad` where you want to train",
            )
        self._glue.backward_loss(loss)

    def backward(self, number: int) -> None:
        """Backward through unit call `number` and the code before it."""
        cut, self._cuts[number] = self._cuts[number], None
        if cut is not None:
            inputs = cut.inputs
            self._glue.backward(number, inputs, cut.backward())

    def close(self) -> None:
        self._coroutine.close()

    def _resume(self, stretch: int, value: Any = None) -> None:
        self._randomness.start(stretch)
        self._at = self._coroutine.resume(value)

    def _out_of_order(self, number: int, expected: str) -> ModelError:
        called = self._at.unit if isinstance(self._at, UnitCall) else "none"
        wanted = f"unit '{expected}' was to be called" if expected else "the loss was to come"
        return ModelError(
            f"the model calls its units in another order than the plan: {wanted} as call "
            f"{number + 1} of {len(self._calls)}, the model called '{called}'",
            why="the order of unit calls must be the same on every rank and in every step",
            fix="profile and plan again for this model and its current settings",
        )


def forward(parts: Parts, batches: Sequence[MicroBatch], *, keep: bool) -> None:
    """All micro-batches through all units; each then waits before the head."""
    record = parts.record
    parts.root.start_gather()
    parts.call(0).start_gather()
    parts.root.gathered()
    record.computes("forward", ROOT)
    for batch in batches:
        batch.start()
    last = len(parts.calls) - 1
    for number in range(last + 1):
        unit = parts.call(number)
        unit.gathered()
        record.computes("forward", unit.name)
        if number < last:
            parts.call(number + 1).start_gather()
        for batch in batches:
            batch.forward(number, unit, keep=keep)
            if number < last:
                batch.resume(number)
        if number == last or parts.call(number + 1) is not unit:
            unit.release()


def head(
    parts: Parts, batches: Sequence[MicroBatch], scale: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Head and loss of one micro-batch after the other, so that one's logits are alive at a time.

    Args:
        scale: with it, backward from loss x scale follows each loss; without, no backward.

    Returns:
        (summed loss, count) of each micro-batch, without graph.
    """
    last = len(parts.calls) - 1
    parts.record.computes("head", ROOT)
    if scale is not None:
        parts.call(last).start_gather()
        parts.root.begin_gradient()
    results = []
    with parts.head.step(scale) if parts.head else nullcontext():
        for batch in batches:
            batch.resume(last)
            loss, count = batch.finish()
            if scale is not None:
                batch.backward_loss(loss * scale)
            results.append((loss.detach(), count))
            del loss
    return results


def backward(
    parts: Parts, batches: Sequence[MicroBatch], gradient_scale: Callable[[], torch.Tensor]
) -> None:
    """All micro-batches backward through all units; reduces each unit's gradient once.

    Args:
        gradient_scale: what the summed gradients are multiplied with; asked when the first
            reduction is done.
    """
    first_call = {name: parts.calls.index(name) for name in parts.units}
    begun: set[str] = set()
    record = parts.record
    reducing: ShardedUnit | None = None
    for number in reversed(range(len(parts.calls))):
        unit = parts.call(number)
        unit.gathered()
        record.computes("backward", unit.name)
        if number:
            parts.call(number - 1).start_gather()
        if unit.name not in begun:
            begun.add(unit.name)
            unit.begin_gradient()
        for batch in batches:
            batch.backward(number)
        if number == 0 or parts.call(number - 1) is not unit:
            unit.release()
        if number == first_call[unit.name]:
            unit.start_reduce(gradient_scale)
            if reducing is not None:
                reducing.reduced()
            reducing = unit
    parts.root.start_reduce(gradient_scale)
    if reducing is not None:
        reducing.reduced()
    parts.root.reduced()
    parts.root.release()
    record.overhead()
