"""A micro-batch's pass through a pipeline stage, from unit call to unit call and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from gpumix.engine.batch.batch_split import Loss, MicroBatchTask
from gpumix.engine.model.forward_coroutine import Coroutine, ForwardResult, ModelError, UnitCall
from gpumix.engine.offload.host_offload import OffloadStore
from gpumix.engine.schedule.remote_stage_values import (
    VALUE_DEPENDENCE_ERRORS,
    refuse_without_values,
)
from gpumix.engine.unit.sharded_units import ShardedUnit
from gpumix.engine.unit.split_backward import SplitBackward
from gpumix.engine.unit.unit_call import InterUnitGraph, UnitBoundary, divide_call_inputs


class StageEntry(Protocol):
    """Entry of a micro-batch into a later stage, with outputs of earlier stages.

    Attributes:
        earlier: calls of earlier stages.
        sends: for each call of the stage, places of the outputs sent to later stages.
    """

    @property
    def earlier(self) -> Sequence[str]: ...

    @property
    def sends(self) -> Mapping[int, Sequence[int]]: ...

    def returned(self, call: UnitCall) -> Any:
        """Return the result of the next call, computed in an earlier stage."""


class MicroBatch:
    """A micro-batch that stops at every unit. With a plan of one stage, units may be skipped, as
    LayerDrop does at random; a skipping micro-batch waits while units run for the rest.

    Args:
        task: runs the model and returns (summed loss, count), and its random numbers.
        calls: names of the stage's units in the order of the model's calls; calls are numbered from
            0 here.
        kept_from: number of the first unit call whose graph is kept; earlier ones are recomputed.
        host: where inputs for the recompute are kept; None: on the device.
        entry: None if there is one stage. Outputs sent to later stages are put into `sent`.

    Attributes:
        repeats: a forward without backward, in which units run again and in any order: the
            micro-batch waits for the unit that the model calls, in a later pass if need be.
    """

    def __init__(
        self,
        task: MicroBatchTask,
        *,
        calls: Sequence[str],
        compute_dtype: torch.dtype,
        kept_from: int,
        host: OffloadStore | None = None,
        entry: StageEntry | None = None,
    ) -> None:
        self._coroutine = Coroutine(task.compute_loss, task.randomness)
        self._entry = entry
        self._earlier: Sequence[str] = entry.earlier if entry is not None else ()
        self._sends: Mapping[int, Sequence[int]] = entry.sends if entry is not None else {}
        self.sent: dict[tuple[int, int], torch.Tensor] = {}
        self._weights: dict[int, SplitBackward] = {}
        self._calls = calls
        self._randomness = task.randomness
        self._dtype = compute_dtype
        self._kept_from = kept_from
        self.host = host
        self._glue = InterUnitGraph()
        self._cuts: list[UnitBoundary | None] = []
        self._at: UnitCall | ForwardResult | None = None
        self._outputs: Any = None
        self._is_left_out = False  # whether the model skips the current call
        self.repeats = False

    def start(self) -> None:
        """Run the code before the stage's first unit."""
        self._resume(0)
        for number, name in enumerate(self._earlier):
            assert self._entry is not None
            self._resume(2 * number + 2, self._entry.returned(self._require_call(number, name)))

    def forward(self, number: int, unit: ShardedUnit, *, keep: bool, goes_on: bool) -> None:
        """Run unit call `number`.

        Args:
            keep: for backward.
            goes_on: continue to the next unit call or the end; else `resume` does.
        """
        if self._leaves_out(number):
            self._is_left_out = True
            if keep:
                self._cuts.append(None)
        else:
            self._run_unit(number, unit, keep=keep)
        if goes_on:
            self.resume(number)

    def _run_unit(self, number: int, unit: ShardedUnit, *, keep: bool) -> None:
        call = self._require_call(len(self._earlier) + number, unit.name)
        if unit.positions is not None:
            call = divide_call_inputs(call, unit)
        cut = UnitBoundary(
            call,
            unit,
            compute_dtype=self._dtype,
            seed=partial(self._randomness.start, 2 * (len(self._earlier) + number) + 1),
            recompute=number < self._kept_from,
            host=self.host,
            sends=self._sends.get(number, ()),
        )
        self._at = None
        if keep:
            self._outputs = self._glue.forward(number, cut)
            self._cuts.append(cut if cut.differentiable else None)
        else:
            self._outputs = cut.forward()
        for place, value in zip(self._sends.get(number, ()), cut.sent):
            self.sent[number, place] = value
        cut.sent = []

    @property
    def is_finished(self) -> bool:
        """True if the model has returned."""
        return isinstance(self._at, ForwardResult)

    def _leaves_out(self, number: int) -> bool:
        """Return whether the model has passed unit call `number` without calling it."""
        if self._entry is not None:  # stages wait for each other's outputs
            return False
        if isinstance(self._at, UnitCall):
            if self.repeats and self._at.unit != self._calls[number]:
                return self._at.unit in self._calls
            return is_skipping_units(self._calls, number, self._at.unit)
        return isinstance(self._at, ForwardResult)

    def _require_call(self, number: int, name: str) -> UnitCall:
        """Return the current call, which must be call `number` of all, to unit `name`."""
        call = self._at
        if not isinstance(call, UnitCall) or call.unit != name:
            called = call.unit if isinstance(call, UnitCall) else ""
            raise make_call_order_error([*self._earlier, *self._calls], number, called)
        return call

    def resume(self, number: int) -> None:
        """Continue after unit call `number`, to the next unit call or the end."""
        if self._is_left_out:
            self._is_left_out = False
            return
        outputs, self._outputs = self._outputs, None
        self._resume(2 * (len(self._earlier) + number) + 2, outputs)

    def finish(self) -> Loss:
        """Return (summed loss, count) of the finished micro-batch."""
        if not isinstance(self._at, ForwardResult):
            assert self._at is not None
            calls = [*self._earlier, *self._calls]
            raise make_call_order_error(calls, len(calls), self._at.unit)
        loss, count = self._at.value
        if self._entry is not None:
            refuse_without_values(loss, "loss")
        self._at = None
        return loss, count

    def run_head(self, last_call: int, scale: torch.Tensor | None) -> Loss:
        """Continue after the last unit call to the end. Return (summed loss, count), without graph.

        Args:
            scale: if given, run backward of loss * scale to the last unit's outputs.
        """
        self.resume(last_call)
        loss, count = self.finish()
        if scale is not None:
            scaled = loss * scale
            refuse_detached(scaled)
            self._glue.backward_loss(scaled)
        return loss.detach(), count

    def expect_gradients(self) -> None:
        """Prepare for `add_gradient` instead of a loss, in stages without a loss."""
        self._glue.find_shared_graphs()
        self._outputs = None
        self._coroutine.close()

    def add_gradient(self, number: int, place: int, gradient: torch.Tensor) -> None:
        """Add the gradient of output `place` of unit call `number`, received from a later stage."""
        cut = self._cuts[number]
        if cut is not None:
            cut.add_gradient(place, gradient)

    def prefetch(self, number: int) -> None:
        """Prefetch inputs on the host for backward through unit call `number`."""
        cut = self._cuts[number]
        if cut is not None and self.host is not None:
            cut.prefetch()

    def backward(self, number: int, *, splits: bool = False) -> None:
        """Run backward through unit call `number` and the code before it. With `splits`, gradients
        of a kept graph's parameters are left to `backward_weights`."""
        cut, self._cuts[number] = self._cuts[number], None
        if cut is not None:
            self._glue.backward(number, cut, splits=splits)
            if cut.weights is not None:
                self._weights[number] = cut.weights

    def backward_weights(self, number: int) -> None:
        """Compute the gradients left by `backward`."""
        weights = self._weights.pop(number, None)
        if weights is not None:
            weights.backward()

    def close(self) -> None:
        """Drop the rest of the model's run, if any."""
        if not self._coroutine.greenlet.dead:
            self._coroutine.close()

    def _resume(self, stretch: int, value: Any = None) -> None:
        try:
            self._at = self._coroutine.resume(value, stretch)
        except VALUE_DEPENDENCE_ERRORS as error:
            last = [*self._earlier, *self._calls][: stretch // 2][-1:]
            raise ModelError(
                "the model's own code looks at values that another stage has",
                code="remote-value-read",
                where=f"after unit '{last[0]}'" if last else "before the first unit",
                why=str(error),
                fix="profile and plan again for this model, or make a plan of one stage",
            ) from error


def refuse_detached(loss: torch.Tensor) -> None:
    """Raise a ModelError if the loss needs no gradient."""
    if not loss.requires_grad:
        raise ModelError(
            "the loss does not depend on any parameter that is trained",
            code="loss-without-parameters",
            fix="compute it with gradients: no `torch.no_grad()` or `.detach()` on the way, "
            "and `requires_grad` where you want to train",
        )


def is_skipping_units(calls: Sequence[str], number: int, called: str) -> bool:
    """Return whether the model, calling `called` instead of call `number`, only skips units."""
    return called != calls[number] and called in calls[number + 1 :]


def make_call_order_error(calls: Sequence[str], number: int, called: str) -> ModelError:
    """Return the error of a model that calls `called` ("" for none) as call `number`, from 0,
    unlike the plan."""
    wanted, again = "the loss was to come", ""
    if number < len(calls):
        wanted = f"unit '{calls[number]}' was to be called as call {number + 1} of {len(calls)}"
    elif called in calls:
        wanted = f"units that are called behind '{called}' were called before it"
    if number == len(calls):  # as an evaluation does that calls the model twice
        again = "call the model as often as a training step does, and reuse its outputs; or "
    return ModelError(
        f"the model calls its units in another order than the plan: {wanted}, the model called "
        f"'{called or 'none'}'",
        code="unit-order-changed",
        why="the order of unit calls must be the same on every rank and in every step; a plan of "
        "one stage lets a pass leave units out",
        fix=again + "profile and plan again for this model and its current settings (a plan of "
        "gpumix.testing.plan_for takes all unit calls in order, as calls=...); for LayerDrop plan "
        "with techniques.max_pipeline_stages=1",
    )
