"""The sequential order: forward and backward of one micro-batch after the other.

Only where every rank holds all parameters and whole gradients (ZeRO stages 0 and 1). The model runs
as its author wrote it, its graph uncut: a unit call is answered where it happens. Parameters that
other ranks have updated arrive during the first forward pass; the reduction of a bucket begins in
the last backward pass, as soon as its gradient is done. Collectives come in the same order as in
layers, so that ranks of both orders may meet.
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

from gpumix.engine import stands
from gpumix.engine.boundary import (
    Run,
    cast,
    model_containers,
    refuse_inputs,
    refuse_outputs,
    refuse_writes,
    versions,
)
from gpumix.engine.buckets import Bucket, Reductions
from gpumix.engine.buffers import BufferCopies
from gpumix.engine.captured import Captured
from gpumix.engine.containers import Containers, fill
from gpumix.engine.coroutine import Calls, ThreadState
from gpumix.engine.given import Given
from gpumix.engine.micro_batch import Loss, goes_past, out_of_order, refuse_detached
from gpumix.engine.parts import Parts, ShardedUnit
from gpumix.engine.randomness import Randomness
from gpumix.engine.recompute import Recomputed
from gpumix.engine.record import SILENT, Record
from gpumix.engine.values import Arguments, unflatten
from gpumix.spec.profile import ROOT


@dataclass(frozen=True)
class InlineBatch:
    """One micro-batch that runs through without a stop.

    Attributes:
        compute_loss: runs the model and returns (summed loss, count).
        keeps: whether the graph of a unit call is kept, by its number; else it is recomputed.
    """

    compute_loss: Callable[[], Loss]
    randomness: Randomness
    compute_dtype: torch.dtype
    keeps: Callable[[int], bool]


def run(
    parts: Parts,
    calls: Calls,
    batches: Sequence[InlineBatch],
    scale: torch.Tensor,
    exchange: Callable[[list[Loss]], Reductions],
    *,
    leaves_out: bool = False,
) -> None:
    """Forward and backward of all micro-batches, the last one first: it may be smaller, and there
    is more to reduce than to gather.

    Args:
        calls: where the model's unit calls arrive.
        scale: what each loss is multiplied with before its backward.
        exchange: starts to tell all ranks the losses and counts; gives what reduces.
        leaves_out: whether the model may leave out its last units: then what comes behind these is
            gathered first.
    """
    gathering = _Gathering(parts)
    if leaves_out:
        parts.after.gathered()
    results: list[Loss] = []
    reducing: _Reducing | None = None
    if not batches:
        gathering.finish()
        reducing = _Reducing(parts, exchange(results))
    for left, batch in zip(reversed(range(len(batches))), reversed(batches)):
        answers = _Answers(parts, batch, gathering)
        with parts.head.step(scale) if parts.head else nullcontext():
            with calls.answered(answers.answer):
                batch.randomness.start(0)
                loss, count = batch.compute_loss()
            answers.leave_out_rest()
            refuse_detached(loss)
            results.append((loss.detach(), count))
            if left == 0:
                reducing = _Reducing(parts, exchange(results))
                reducing.watch()
            stands.computes("backward")
            torch.autograd.backward(loss * scale)
            del loss
    assert reducing is not None
    reducing.finish()
    parts.record.overhead()


class _Gathering:
    """The gathers of a step, each beside the computing of the unit before; done once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        for bucket in (parts.before, *parts.throughout, parts.bucket(0)):
            bucket.start_gather()
        for bucket in (parts.before, *parts.throughout):
            bucket.gathered()
        parts.record.computes("forward", ROOT)
        for bucket in parts.buckets:
            bucket.begin_gradient()

    def reach(self, number: int) -> None:
        """Call `number` is to be computed; the number of calls: the head is."""
        parts = self._parts
        if number > parts.last_call:
            parts.after.gathered()
            return
        parts.bucket(number).gathered()
        parts.ahead[number].start_gather()

    def finish(self) -> None:
        """Without any samples."""
        for number in range(self._parts.last_call + 2):
            self.reach(number)


class _Reducing:
    """The reductions of a step: each begins when it is its turn and its gradient is done."""

    def __init__(self, parts: Parts, reductions: Reductions) -> None:
        after = parts.reduced_after
        units = [after[number] for number in sorted(after, reverse=True)]
        self._waiting = [parts.after, *units, *parts.throughout, parts.before]
        self._reductions = reductions
        self._head = parts.head
        self._missing: dict[int, int] = {}
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Notice when parameters get their gradients: in the one backward that follows.

        What the root uses throughout comes last anyway. A head in chunks adds to its gradients by
        itself, where nobody sees it, but before any unit's backward.
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
        """The backward is over: reduce also what got no gradient, and wait for all."""
        for hook in self._hooks:
            hook.remove()
        while self._waiting:
            self._reductions.start(self._waiting.pop(0))
        self._reductions.finish()


def _tell_of_backward(record: Record, name: str, outputs: Any) -> None:
    """Note when the gradient of a unit's output is there."""
    for output in tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: record.computes("backward", name))


class _Answers:
    """Runs the unit calls of one micro-batch where they happen."""

    def __init__(self, parts: Parts, batch: InlineBatch, gathering: _Gathering) -> None:
        self._parts = parts
        self._batch = batch
        self._gathering = gathering
        self._number = 0

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self._parts
        while self._number <= parts.last_call and goes_past(parts.calls, self._number, name):
            self._leave_out()
        number = self._number
        if number > parts.last_call or parts.calls[number] != name:
            raise out_of_order(parts.calls, number, name)
        self._number += 1
        self._gathering.reach(number)
        unit = parts.call(number)
        parts.record.computes("forward", name)
        args, kwargs = unit.taken(args, kwargs)
        seed = partial(self._batch.randomness.start, 2 * number + 1)
        if self._batch.keeps(number) or not torch.is_grad_enabled():
            outputs = self._kept(unit, seed, args, kwargs)
        else:
            outputs = self._recomputed(unit, seed, args, kwargs)
        self._batch.randomness.start(2 * number + 2)
        if parts.record is not SILENT:
            _tell_of_backward(parts.record, name, outputs)
        if number == parts.last_call:
            self._gathering.reach(number + 1)
            parts.record.computes("head", ROOT)
        return outputs

    def _leave_out(self) -> None:
        """The model goes past a call without it: other ranks gather what it takes."""
        self._gathering.reach(self._number)
        self._number += 1

    def leave_out_rest(self) -> None:
        """The model is at its end."""
        while self._number <= self._parts.last_call:
            self._leave_out()

    def _kept(
        self,
        unit: ShardedUnit,
        seed: Callable[[], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        inputs, arguments = Arguments.of(args, kwargs)
        refuse_inputs(unit.name, inputs)
        before = versions(inputs)
        own = model_containers(unit, args, kwargs)
        args, kwargs = arguments.filled([cast(t, self._batch.compute_dtype) for t in inputs])
        seed()
        copies = Containers(unit.name, args, kwargs)
        outputs = unit.forward(*args, **kwargs)
        fill(own, copies)
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
        inputs, arguments = Arguments.of(args, kwargs)
        refuse_inputs(unit.name, inputs)
        before = versions(inputs)
        own = model_containers(unit, args, kwargs)
        captured = Captured(contextvars.copy_context(), own)
        state, dtype = ThreadState.capture(), self._batch.compute_dtype
        once = Run(unit.name, unit.forward, state, captured, dtype, seed, arguments)
        sources = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        given = Given(sources, [isinstance(t, torch.Tensor) and t.requires_grad for t in inputs])
        buffers = BufferCopies(unit.with_buffers)

        def again() -> Any:
            what = f"an input of unit '{unit.name}' was written into after the call"
            refuse_writes(sources, before, what)
            return once.again(given, buffers)

        recomputed = Recomputed(unit.name, again)
        outputs, structure = recomputed.forward(partial(once, inputs))
        recomputed.expect_backward()
        buffers.keep_changed()
        refuse_writes(inputs, before, f"unit '{unit.name}' writes into its own input")
        refuse_outputs(unit, outputs)
        result, collected = unflatten(structure, iter(outputs))
        captured.hand_over(collected)
        return result
