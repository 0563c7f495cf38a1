"""The layered schedule: unit k of every micro-batch, then unit k + 1 of any.

Each bucket is gathered once per pass and its gradient reduced once per step, for any number of
micro-batches. So ranks with different numbers and sizes of micro-batches, even none, issue exactly
the same collectives. The gather of the next bucket and the reduction of the last overlap with the
compute of the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from gpumix.engine.schedule.micro_batch import MicroBatch
from gpumix.engine.sharding.bucket import Bucket, BucketReductions, GradientProgress
from gpumix.engine.unit.sharded_units import ShardedUnits
from gpumix.schema.profile.profile import ROOT


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


def forward(parts: ShardedUnits, turns: MicroBatchOrder, *, keep: bool) -> None:
    """Run all micro-batches through all units; each stops before the head, or in it, if the model
    skips its last units."""
    record = parts.record
    first = (parts.before, *parts.always_used_buckets)
    for bucket in (*first, parts.sequence[0].bucket):
        bucket.start_gather()
    for bucket in first:
        bucket.gathered()
    record.computes("forward", ROOT)
    for batch in turns.of(-1):
        batch.start()
    parts.before.release()
    last = parts.last_call
    for number in range(last + 1):
        unit = parts.sequence[number]
        unit.bucket.gathered()
        record.computes("forward", unit.name)
        parts.ahead[number].start_gather()
        for batch in turns.of(number):
            batch.forward(number, unit, keep=keep)
            if number < last:
                batch.resume(number)
        if number < last and parts.sequence[number + 1].bucket is not unit.bucket:
            unit.bucket.release()


def run_head(
    parts: ShardedUnits, turns: MicroBatchOrder, scale: torch.Tensor | None, begun: GradientProgress
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run head and loss by micro-batch. Only one micro-batch's logits are alive at a time.

    Args:
        scale: if given, backward of loss * scale follows each loss; None: no backward.
        begun: progress of gradients.

    Returns:
        (summed loss, count) of each micro-batch, without graph.
    """
    parts.after.gathered()
    parts.record.computes("head", ROOT)
    if scale is not None:
        begun.begin(*parts.always_used_buckets, parts.before, parts.after)
    results = []
    with parts.head.step(scale) if parts.head else nullcontext():
        for batch in turns.of(parts.last_call + 1):
            batch.resume(parts.last_call)
            loss, count = batch.finish()
            if scale is not None:
                batch.backward_loss(loss * scale)
            results.append((loss.detach(), count))
            del loss
    parts.after.release()
    return results


def run_repeatedly(
    parts: ShardedUnits,
    batches: Sequence[MicroBatch],
    *,
    is_any: Callable[[bool], bool],
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], bool]:
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
                unit.bucket.gathered()
                parts.record.computes("forward", unit.name)
                for batch in batches:
                    batch.forward(number, unit, keep=False)
                    if number < parts.last_call:
                        batch.resume(number)
                unit.bucket.release()
            parts.record.computes("head", ROOT)
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
    for number in _iterate_backward(parts, None if splits else reductions, begun, adds=not splits):
        turn = turns.of(number)
        for place, batch in enumerate(turn):
            if place + 1 < len(turn):
                turn[place + 1].prefetch(number)
            elif number:
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
    record, reduced_after = parts.record, parts.reduced_after
    for number in reversed(range(parts.last_call + 1)):
        unit = parts.sequence[number]
        bucket = unit.bucket
        bucket.gathered()
        record.computes("backward", unit.name)
        behind = parts.behind[number]
        if behind is not None:
            behind.start_gather()
        if adds:
            begun.begin(bucket)
        yield number
        if not number or parts.sequence[number - 1].bucket is not bucket:
            bucket.release()
        if reductions is not None and number in reduced_after:
            begun.reduce(bucket, reductions)


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
    for parts in stages:
        after = parts.reduced_after
        units = [after[number] for number in sorted(after, reverse=True)]
        begun.reduce_rest((parts.after, *units, parts.root, parts.before), reductions)
    for bucket in shared:
        begun.reduce(bucket, reductions)
    reductions.finish()
    stages[0].record.overhead()
