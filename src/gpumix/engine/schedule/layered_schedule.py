"""The layered schedule: unit k of every micro-batch, then unit k + 1 of any.

Each bucket is gathered once per pass and its gradient reduced once per step, for any number of
micro-batches. So ranks with different numbers and sizes of micro-batches, even none, issue exactly
the same collectives. The gather of the next bucket and the reduction of the last overlap with the
compute of the current one.

A schedule is the order in which a rank's micro-batches go through units: this one, or a sequential
or pipeline-parallel one, in modules of their own.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from gpumix.engine.batch.batch_split import Loss, MicroBatchTask
from gpumix.engine.comm.step_recorder import SILENT
from gpumix.engine.offload.host_offload import OffloadStore
from gpumix.engine.schedule.micro_batch import MicroBatch, StageEntry
from gpumix.engine.sharding.bucket import (
    Bucket,
    BucketReductions,
    GradientProgress,
    gather_buckets,
)
from gpumix.engine.unit.sharded_units import ShardedUnits
from gpumix.schema.plan.stage import Worker
from gpumix.schema.profile.profile import ROOT

# Exchanges (summed loss, count) of each micro-batch; returns the scale of gradients, when known.
Exchange = Callable[[list[Loss]], Callable[[], torch.Tensor]]
Done = Callable[[Bucket], None]  # called with a bucket whose gradient is in its pieces


@dataclass(frozen=True)
class StepTasks:
    """Tasks of a rank in a training step.

    Attributes:
        micro_batches: of this rank, in order.
        rows: places of each micro-batch's samples in the global batch.
        scale: factor of each loss before its backward, a scalar.
        exchange: called once with all losses of the rank; see `Exchange`.
        done: called with each finished bucket; None: buckets are not needed before the end.
    """

    micro_batches: list[MicroBatchTask]
    rows: Sequence[range]
    scale: torch.Tensor
    exchange: Exchange
    done: Done | None


@dataclass(frozen=True)
class Schedule(ABC):
    """Schedule of the micro-batches of a rank.

    Attributes:
        worker: of this rank, in the first of its stages.
        dtype: of computation.
        host: keeps inputs of units on the host.
        in_order: whether each unit takes micro-batches in order, because it updates buffers.
    """

    worker: Worker
    dtype: torch.dtype
    host: OffloadStore
    in_order: bool

    @abstractmethod
    def run_step(self, step: StepTasks) -> None:
        """Run forward and backward of micro-batches, and reduce gradients."""

    @abstractmethod
    def run_forward(self, cut: list[MicroBatchTask], rows: Sequence[range]) -> list[Loss]:
        """Run forward of micro-batches; return (summed loss, count) of each."""

    def run_repeatedly(
        self,
        cut: list[MicroBatchTask],
        rows: Sequence[range],
        is_any: Callable[[bool], bool],
    ) -> tuple[list[Loss], bool]:
        """Run forward of micro-batches that may call the model several times.

        Args:
            is_any: whether an argument is true on any rank. Collective.

        Returns:
            (summed loss, count) of each; whether a unit was called again on any rank, which is
                possible with one stage.
        """
        return self.run_forward(cut, rows), False

    def _make_micro_batch(
        self,
        parts: ShardedUnits,
        cut: list[MicroBatchTask],
        place: int,
        *,
        keep: bool,
        worker: Worker | None = None,
        entry: StageEntry | None = None,
    ) -> MicroBatch:
        """Make the micro-batch at `place` of `cut`; `keep`: for backward, in the mode of the
        stage's worker, by default this rank's."""
        worker, calls = worker or self.worker, len(parts.calls)
        return MicroBatch(
            cut[place],
            calls=parts.calls,
            compute_dtype=self.dtype,
            kept_from=find_first_kept_call(worker, calls, place, len(cut)) if keep else calls,
            host=self.host if keep and worker.mode.boundary == "host" else None,
            entry=entry,
        )


def find_first_kept_call(worker: Worker, calls: int, place: int, batches: int) -> int:
    """Return the unit call from which on the micro-batch at `place` of `batches` keeps its graphs.
    Kept are the last pairs of call and micro-batch in forward order, as many as planned."""
    if not worker.mode.recompute:
        return 0
    first = calls * batches - worker.kept_graphs
    return -((place - first) // batches)


@dataclass(frozen=True)
class MicroBatchOrder:
    """The micro-batches of a rank and their order in unit calls. Consecutive calls alternate
    between forward and reverse order, so that a call begins with data that the previous call left
    in caches.

    Args:
        in_order: whether each call must keep the order, because it updates the model's buffers.
    """

    batches: Sequence[MicroBatch]
    in_order: bool = False

    def of(self, call: int) -> Sequence[MicroBatch]:
        """Return the order of a call, in either pass. Call -1 is the code before the first call,
        which receives earlier stages' outputs in order.

        The last micro-batch, which may be smaller, stays last: code is compiled for larger ones
        first.
        """
        if self.in_order or call < 0 or call % 2 == 0:
            return self.batches
        return [*self.batches[-2::-1], *self.batches[-1:]]


@dataclass(frozen=True)
class LayeredSchedule(Schedule):
    """Unit k of every micro-batch, then unit k + 1 of any: see this module.

    Attributes:
        leaves_out: whether the model may skip its last units, and so reach the head early.
        waves: parts of the micro-batches that go forward and backward one after another. Ranks
            gather and reduce in each wave, also ranks without a micro-batch in it.
    """

    parts: ShardedUnits
    leaves_out: bool
    waves: int

    def run_step(self, step: StepTasks) -> None:
        parts, cut = self.parts, step.micro_batches
        batches = [self._make_micro_batch(parts, cut, n, keep=True) for n in range(len(cut))]
        with close_micro_batches(batches), contextlib.ExitStack() as stack:
            if self.leaves_out and parts.head is not None:
                stack.enter_context(parts.head.whole())
            if self.waves == 1:
                results, turns, begun = self._run_until_head(batches, step)
                reductions = self._make_reductions(step.exchange(results), step.done)
                backward(parts, turns, reductions, begun)
                finish_reductions([parts], reductions, begun)
            else:
                self._run_waves(batches, step)

    def _run_until_head(
        self, batches: Sequence[MicroBatch], step: StepTasks
    ) -> tuple[list[Loss], MicroBatchOrder, GradientProgress]:
        """Run micro-batches forward, and backward through the head."""
        turns = MicroBatchOrder(batches, in_order=self.in_order)
        begun = GradientProgress()
        forward(self.parts, turns, keep=True)
        return run_head(self.parts, turns, step.scale.float(), begun), turns, begun

    def _run_waves(self, batches: Sequence[MicroBatch], step: StepTasks) -> None:
        """Run one wave after another. Sums of gradients are added up over waves, and scaled at the
        end."""
        every: list[Loss] = []
        for wave in range(self.waves):
            begin, end = (len(batches) * n // self.waves for n in (wave, wave + 1))
            results, turns, begun = self._run_until_head(batches[begin:end], step)
            every += results
            reductions = self._make_reductions(None, None)
            backward(self.parts, turns, reductions, begun)
            finish_reductions([self.parts], reductions, begun)
        gradient_scale = step.exchange(every)
        gradient_scale()
        for bucket in self.parts.buckets:
            bucket.settle(gradient_scale)
            if step.done is not None:
                step.done(bucket)

    def run_forward(self, cut: list[MicroBatchTask], rows: Sequence[range]) -> list[Loss]:
        parts = self.parts
        batches = [self._make_micro_batch(parts, cut, n, keep=False) for n in range(len(cut))]
        # With full parameters here, one after another, for the lowest memory use.
        whole = parts.layout.whole_parameters and len(batches) > 1
        results: list[Loss] = []
        with close_micro_batches(batches):
            for some in [[b] for b in batches] if whole else [batches]:
                turns = MicroBatchOrder(some, in_order=self.in_order)
                forward(parts, turns, keep=False)
                results += run_head(parts, turns, None, GradientProgress())
        return results

    def run_repeatedly(
        self,
        cut: list[MicroBatchTask],
        rows: Sequence[range],
        is_any: Callable[[bool], bool],
    ) -> tuple[list[Loss], bool]:
        parts = self.parts
        batches = [self._make_micro_batch(parts, cut, n, keep=False) for n in range(len(cut))]
        with close_micro_batches(batches), contextlib.ExitStack() as stack:
            if self.leaves_out and parts.head is not None:
                stack.enter_context(parts.head.whole())
            if not parts.layout.whole_parameters:
                return run_repeatedly(parts, batches, is_any=is_any)
            # With full parameters here, one after another; ranks need not go together.
            results: list[Loss] = []
            repeats = False
            for some in [[b] for b in batches] or [[]]:
                found, again = run_repeatedly(parts, some, is_any=lambda own: own)
                results, repeats = [*results, *found], repeats or again
            return results, is_any(repeats)

    def _make_reductions(
        self, gradient_scale: Callable[[], torch.Tensor] | None, done: Done | None
    ) -> BucketReductions:
        layout = self.parts.layout
        at_once = layout.replicated and not layout.others
        return BucketReductions(gradient_scale, at_once=at_once, done=done)


@contextmanager
def close_micro_batches(batches: Sequence[MicroBatch]) -> Iterator[None]:
    """Close all micro-batches on exit, also after errors."""
    try:
        yield
    finally:
        for micro_batch in batches:
            micro_batch.close()


def forward(parts: ShardedUnits, turns: MicroBatchOrder, *, keep: bool) -> None:
    """Run all micro-batches through all units; each stops before the head, or in it, if the model
    skips its last units."""
    gather_buckets((parts.before, *parts.always_used_buckets), parts.sequence[0].bucket)
    for batch in turns.of(-1):
        batch.start()
    last = parts.last_call
    left: Bucket | None = parts.before
    for number in range(last + 1):
        unit = parts.sequence[number]
        unit.bucket.take_turn("forward", unit.name, left, parts.ahead[number])
        for batch in turns.of(number):
            batch.forward(number, unit, keep=keep, goes_on=number < last)
        kept = number == last or parts.sequence[number + 1].bucket is unit.bucket
        left = None if kept else unit.bucket


def run_head(
    parts: ShardedUnits, turns: MicroBatchOrder, scale: torch.Tensor | None, begun: GradientProgress
) -> list[Loss]:
    """Run head and loss by micro-batch. Only one micro-batch's logits are alive at a time.

    Args:
        scale: if given, backward of loss * scale follows each loss; None: no backward.
        begun: progress of gradients.

    Returns:
        (summed loss, count) of each micro-batch, without graph.
    """
    parts.after.take_turn("head", ROOT)
    if scale is not None:
        begun.begin(*parts.always_used_buckets, parts.before, parts.after)
    with parts.head.step(scale) if parts.head else nullcontext():
        last, turn = parts.last_call, turns.of(parts.last_call + 1)
        results = [batch.run_head(last, scale) for batch in turn]
    parts.after.release()
    return results


def run_repeatedly(
    parts: ShardedUnits,
    batches: Sequence[MicroBatch],
    *,
    is_any: Callable[[bool], bool],
) -> tuple[list[Loss], bool]:
    """Run all micro-batches through all units, without backward, until no rank has a micro-batch
    left that calls a unit again: an evaluation may call the model twice. All of the root's
    parameters are gathered throughout, and nothing is gathered ahead.

    Args:
        is_any: whether an argument is true on any rank. Collective.

    Returns:
        (summed loss, count) of each micro-batch, without graph; whether a unit was called again.
    """
    for bucket in (*parts.always_used_buckets, parts.before, parts.after):
        bucket.gathered_apart()
    for batch in batches:
        batch.repeats = True
        batch.start()
    passes = 0
    with parts.head.step(None) if parts.head else nullcontext():
        while not passes or is_any(not all(batch.is_finished for batch in batches)):
            passes += 1
            for number, unit in enumerate(parts.sequence):
                unit.bucket.take_turn("forward", unit.name)
                for batch in batches:
                    goes_on = number < parts.last_call
                    batch.forward(number, unit, keep=False, goes_on=goes_on)
                unit.bucket.release()
            parts.recorder.now.computes("head", ROOT)
            for batch in batches:
                batch.resume(parts.last_call)
        results = [batch.finish() for batch in batches]
    return [(loss.detach(), count) for loss, count in results], passes > 1


def backward(
    parts: ShardedUnits,
    turns: MicroBatchOrder,
    reductions: BucketReductions | None,
    begun: GradientProgress,
    *,
    splits: bool = False,
) -> None:
    """Run all micro-batches backward through all units, and start the reduction of finished
    buckets.

    Args:
        reductions: None if more backward passes follow in this step; gradients then accumulate.
        begun: progress of gradients.
        splits: whether the gradients of units' parameters are left to `run_weight_backward`.
    """
    begun.begin(*parts.always_used_buckets, parts.before, parts.after)
    if reductions is not None:
        begun.reduce(parts.after, reductions)
    on_host = any(batch.host is not None for batch in turns.batches)
    for number in _iterate_backward(parts, None if splits else reductions, begun, adds=not splits):
        turn = turns.of(number)
        for place, batch in enumerate(turn):
            if on_host and place + 1 < len(turn):
                turn[place + 1].prefetch(number)
            elif on_host and number:
                turns.of(number - 1)[0].prefetch(number - 1)
            batch.backward(number, splits=splits)


def run_weight_backward(
    parts: ShardedUnits,
    turns: MicroBatchOrder,
    reductions: BucketReductions | None,
    begun: GradientProgress,
) -> None:
    """Compute all gradients left by `backward`; reduces like `backward`."""
    if reductions is not None and not begun.reduced(parts.after):
        begun.reduce(parts.after, reductions)
    for number in _iterate_backward(parts, reductions, begun):
        for batch in turns.of(number):
            batch.backward_weights(number)


def _iterate_backward(
    parts: ShardedUnits,
    reductions: BucketReductions | None,
    begun: GradientProgress,
    *,
    adds: bool = True,
) -> Iterator[int]:
    """Yield the unit calls, last first, each with its parameters gathered.

    Args:
        adds: whether gradients are added to the bucket.
    """
    left: Bucket | None = None
    for number in reversed(range(parts.last_call + 1)):
        unit = parts.sequence[number]
        bucket = unit.bucket
        behind = parts.behind[number]
        bucket.take_turn("backward", unit.name, left, behind, begun if adds else None)
        yield number
        kept = number > 0 and parts.sequence[number - 1].bucket is bucket
        left = None if kept else bucket
        if reductions is not None and number in parts.reduced_after:
            begun.reduce(bucket, reductions)
    if left is not None:
        left.release()


def finish_reductions(
    stages: Sequence[ShardedUnits],
    reductions: BucketReductions,
    begun: GradientProgress,
    *,
    shared: Sequence[Bucket] = (),
) -> None:
    """Start all remaining reductions, and wait for all.

    Args:
        shared: buckets shared with other stages. They come last, in an order equal on all ranks:
            ranks have different stages, and in the order of stages would wait for each other.
    """
    buckets: list[Bucket] = []
    for parts in stages:
        after = parts.reduced_after
        units = [after[number] for number in sorted(after, reverse=True)]
        buckets += (parts.after, *units, parts.root, parts.before)
    begun.finish(buckets, shared, reductions)
    if (record := stages[0].recorder.now) is not SILENT:
        record.overhead()
