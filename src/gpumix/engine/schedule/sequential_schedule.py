"""Sequential order: forward and backward of one micro-batch after another.

Only where every rank has all parameters and full gradients (ZeRO stages 0 and 1). The model runs as
written, with an uncut graph: unit calls are answered in place. Parameters updated by other ranks
arrive during the first forward pass; the reduction of a bucket begins in the last backward pass, as
soon as its gradient is complete. Collectives come in the same order as in layers, so ranks of both
orders may be mixed.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpumix.engine.comm import collective_progress
from gpumix.engine.comm.step_recorder import SILENT
from gpumix.engine.loss.loss_graph import mark_block_output
from gpumix.engine.model.backward_hooks import CheckpointedRun
from gpumix.engine.model.forward_coroutine import Randomness, ThreadState, UnitCallHandlers
from gpumix.engine.model.module_buffers import BufferCopies
from gpumix.engine.model.unit_values import (
    ArgumentsStructure,
    Containers,
    copy_changes,
    take_apart,
)
from gpumix.engine.schedule.layered_schedule import (
    LayeredSchedule,
    StepTasks,
    find_first_kept_call,
)
from gpumix.engine.schedule.micro_batch import (
    Loss,
    is_skipping_units,
    make_call_order_error,
    refuse_detached,
)
from gpumix.engine.sharding.bucket import Bucket, BucketReductions
from gpumix.engine.unit.boundary_checks import refuse_inputs, refuse_outputs
from gpumix.engine.unit.sharded_units import ShardedUnit, ShardedUnits
from gpumix.engine.unit.unit_call import (
    UnitInputs,
    UnitRun,
    cast_floating,
    get_versions,
    refuse_writes,
)
from gpumix.schema.profile.profile import ROOT


@dataclass(frozen=True)
class InlineBatch:
    """Micro-batch that runs without stopping at units.

    Attributes:
        compute_loss: runs the model and returns (summed loss, count).
        kept_from: number of the first unit call whose graph is kept; earlier ones are recomputed.
    """

    compute_loss: Callable[[], Loss]
    randomness: Randomness
    compute_dtype: torch.dtype
    kept_from: int


def run(
    parts: ShardedUnits,
    calls: UnitCallHandlers,
    batches: Sequence[InlineBatch],
    scale: torch.Tensor,
    exchange: Callable[[list[Loss]], BucketReductions],
) -> None:
    """Run forward and backward of all micro-batches, the last first: the last may be smaller, and
    there is more to reduce than to gather.

    Args:
        calls: where the model's unit calls arrive.
        scale: factor of each loss before its backward.
        exchange: starts the exchange of losses and counts over all ranks; returns the reductions.
    """
    gathering = _StepGathers(parts)
    results: list[Loss] = []
    reducing: _StepReductions | None = None
    if not batches:
        gathering.finish()
        reducing = _StepReductions(parts, exchange(results))
    for left, batch in zip(reversed(range(len(batches))), reversed(batches)):
        answers = _UnitCallRunner(parts, batch, gathering)
        with parts.head.step(scale) if parts.head else nullcontext():
            with calls.use_handler(answers.answer):
                batch.randomness.start(0)
                loss, count = batch.compute_loss()
            answers.skip_remaining_calls()
            refuse_detached(loss)
            results.append((loss.detach(), count))
            if left == 0:
                reducing = _StepReductions(parts, exchange(results))
                reducing.watch()
            collective_progress.compute_phase = "backward", ""
            torch.autograd.backward(loss * scale)
            del loss
    assert reducing is not None
    reducing.finish()
    parts.recorder.now.overhead()


@dataclass(frozen=True)
class SequentialSchedule(LayeredSchedule):
    """One micro-batch after another, on ranks with all parameters and full gradients.

    Attributes:
        calls: where the model's unit calls arrive.
    """

    calls: UnitCallHandlers

    def run_step(self, step: StepTasks) -> None:
        calls, cut = len(self.parts.calls), step.micro_batches
        batches = [
            InlineBatch(
                one.compute_loss,
                one.randomness,
                self.dtype,
                find_first_kept_call(self.worker, calls, place, len(cut)),
            )
            for place, one in enumerate(cut)
        ]
        run(
            self.parts,
            self.calls,
            batches,
            step.scale.float(),
            lambda results: self._make_reductions(step.exchange(results), step.done),
        )


class _StepGathers:
    """Gathers of a step, each overlapping with the computation of the unit before; done once."""

    def __init__(self, parts: ShardedUnits) -> None:
        self._parts = parts
        for bucket in (parts.before, *parts.always_used_buckets, parts.sequence[0].bucket):
            bucket.start_gather()
        for bucket in (parts.before, *parts.always_used_buckets):
            bucket.gathered()
        parts.recorder.now.computes("forward", ROOT)
        for bucket in parts.buckets:
            bucket.begin_gradient()

    def prepare_call(self, number: int) -> None:
        """Prepare call `number`; the number of calls stands for the head."""
        parts = self._parts
        if number > parts.last_call:
            parts.after.gathered()
            return
        parts.sequence[number].bucket.gathered()
        parts.ahead[number].start_gather()

    def finish(self) -> None:
        """Gather all buckets on a rank without samples."""
        for number in range(self._parts.last_call + 2):
            self.prepare_call(number)


class _StepReductions:
    """Reductions of a step, each begun in turn once the gradient of the bucket is complete."""

    def __init__(self, parts: ShardedUnits, reductions: BucketReductions) -> None:
        after = parts.reduced_after
        units = [after[number] for number in sorted(after, reverse=True)]
        self._waiting = [parts.after, *units, *parts.always_used_buckets, parts.before]
        self._reductions = reductions
        self._head = parts.head
        self._missing: dict[int, int] = {}
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Observe the arrival of gradients at parameters, in the single backward to follow.

        Parameters that the root uses throughout come last anyway. Chunked cross-entropy adds to its
        gradients unobserved, but before any unit's backward.
        """
        unseen = set() if self._head is None else {id(p) for p in self._head.parameters}
        for bucket in self._waiting[:-2]:
            views = [v for group in bucket.trainable for v in group.views if id(v) not in unseen]
            self._missing[id(bucket)] = len(views)
            for view in views:
                hook = view.register_post_accumulate_grad_hook(partial(self._note, bucket))
                self._hooks.append(hook)

    def _note(self, bucket: Bucket, _: torch.Tensor) -> None:
        self._missing[id(bucket)] -= 1
        while self._missing.get(id(self._waiting[0])) == 0:
            self._reductions.start(self._waiting.pop(0))

    def finish(self) -> None:
        """Reduce the remaining buckets after the backward, and wait for all reductions."""
        for hook in self._hooks:
            hook.remove()
        while self._waiting:
            self._reductions.start(self._waiting.pop(0))
        self._reductions.finish()


class _UnitCallRunner:
    """Execution of the unit calls of one micro-batch, in place."""

    def __init__(self, parts: ShardedUnits, batch: InlineBatch, gathering: _StepGathers) -> None:
        self._parts = parts
        self._batch = batch
        self._gathering = gathering
        self._number = 0

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._parts
        while self._number <= parts.last_call and is_skipping_units(
            parts.calls, self._number, name
        ):
            self._skip_call()
        number = self._number
        if number > parts.last_call or parts.calls[number] != name:
            raise make_call_order_error(parts.calls, number, name)
        self._number += 1
        self._gathering.prepare_call(number)
        unit = parts.sequence[number]
        parts.recorder.now.computes("forward", name)
        args, kwargs = unit.taken(args, kwargs)
        seed = partial(self._batch.randomness.start, 2 * number + 1)
        if number >= self._batch.kept_from or not torch.is_grad_enabled():
            outputs = self._kept(unit, seed, args, kwargs)
        else:
            outputs = self._recomputed(unit, seed, args, kwargs)
        self._batch.randomness.start(2 * number + 2)
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor):
                mark_block_output(output)
                if parts.recorder.now is not SILENT and output.requires_grad:
                    output.register_hook(partial(self._record_backward, name))
        if number == parts.last_call:
            self._gathering.prepare_call(number + 1)
            parts.recorder.now.computes("head", ROOT)
        return outputs

    def _record_backward(self, name: str, _: torch.Tensor) -> None:
        self._parts.recorder.now.computes("backward", name)

    def _skip_call(self) -> None:
        """Skip a call left out by the model, but gather its parameters with all ranks."""
        self._gathering.prepare_call(self._number)
        self._number += 1

    def skip_remaining_calls(self) -> None:
        """Skip all remaining calls, at the model's end."""
        while self._number <= self._parts.last_call:
            self._skip_call()

    def _kept(
        self,
        unit: ShardedUnit,
        seed: Callable[[], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        inputs, arguments = ArgumentsStructure.of(args, kwargs)
        refuse_inputs(unit.name, inputs)
        before = get_versions(inputs)
        own = Containers(unit.name, args, kwargs) if unit.positions is None else None
        args, kwargs = arguments.filled(
            [cast_floating(t, self._batch.compute_dtype) for t in inputs]
        )
        seed()
        copies = Containers(unit.name, args, kwargs)
        outputs = unit.forward(*args, **kwargs)
        copy_changes(own, copies)
        refuse_writes(inputs, before, f"unit '{unit.name}' writes into its own input")
        refuse_outputs(unit, tree_leaves(outputs))
        return outputs

    def _recomputed(
        self,
        unit: ShardedUnit,
        seed: Callable[[], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        inputs, arguments, captured = take_apart(
            unit.name,
            args,
            kwargs,
            contextvars.copy_context(),
            may_change=unit.positions is None,
        )
        refuse_inputs(unit.name, inputs)
        before = get_versions(inputs)
        state, dtype = ThreadState.capture(), self._batch.compute_dtype
        once = UnitRun(unit.name, unit.forward, state, captured, dtype, seed, arguments)
        sources = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        given = UnitInputs(
            sources, [isinstance(t, torch.Tensor) and t.requires_grad for t in inputs]
        )
        buffers = BufferCopies(unit.with_buffers)

        def again() -> Any:
            what = f"an input of unit '{unit.name}' was written into after the call"
            refuse_writes(sources, before, what)
            return once.again(given, buffers)

        recomputed = CheckpointedRun(unit.name, again)
        outputs, structure = recomputed.forward(partial(once, inputs))
        recomputed.expect_backward()
        buffers.keep_changed()
        refuse_writes(inputs, before, f"unit '{unit.name}' writes into its own input")
        refuse_outputs(unit, outputs)
        return captured.hand_over(outputs, structure)
