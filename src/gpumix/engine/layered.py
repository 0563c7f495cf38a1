"""The layered order: unit k of every micro-batch, then unit k + 1 of any.

Each bucket is gathered once per pass and its gradient reduced once per step, however many
micro-batches a rank runs. So ranks with different numbers and sizes of micro-batches, also with
none, issue exactly the same collectives. What each collective hides behind: the gather of the next
bucket behind computing this one, and so the reduction of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from gpumix.engine.buckets import Bucket, Reductions
from gpumix.engine.micro_batch import MicroBatch
from gpumix.engine.parts import Parts
from gpumix.spec.profile import ROOT


@dataclass(frozen=True)
class Turns:
    """The micro-batches of a rank, and the order in which unit calls take them: there and back
    again, so that a call begins with what the one before left in caches.

    Args:
        in_order: whether each call must take them in their order: where it leaves something behind
            in the model's buffers.
    """

    batches: Sequence[MicroBatch]
    in_order: bool = False

    def of(self, call: int) -> Sequence[MicroBatch]:
        """The order of a call, in either pass; call -1 is the code before the first one, in which
        what earlier stages send is received in order.

        The last one, which may be smaller, stays the last: code is compiled for larger ones first.
        """
        if self.in_order or call < 0 or call % 2 == 0:
            return self.batches
        return [*self.batches[-2::-1], *self.batches[-1:]]


class Begun:
    """How far the gradients of each bucket are in a step."""

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._reduced: set[int] = set()

    def begin(self, *buckets: Bucket) -> None:
        """Something will be added to them."""
        for bucket in buckets:
            if id(bucket) not in self._begun:
                self._begun.add(id(bucket))
                self._reduced.discard(id(bucket))
                bucket.begin_gradient()

    def reduce(self, bucket: Bucket, reductions: Reductions) -> None:
        """Start to reduce them."""
        self.begin(bucket)
        self._begun.discard(id(bucket))
        self._reduced.add(id(bucket))
        reductions.start(bucket)

    def reduced(self, bucket: Bucket) -> bool:
        """Whether all that was added to them is on its way."""
        return id(bucket) in self._reduced


def forward(parts: Parts, turns: Turns, *, keep: bool, leaves_out: bool = False) -> None:
    """All micro-batches through all units; each then waits before the head.

    Args:
        leaves_out: whether the model may leave out its last units, and so come to the head early.
    """
    record = parts.record
    first = (parts.before, *parts.throughout, *((parts.after,) if leaves_out else ()))
    for bucket in (*first, parts.bucket(0)):
        bucket.start_gather()
    for bucket in first:
        bucket.gathered()
    record.computes("forward", ROOT)
    for batch in turns.of(-1):
        batch.start()
    parts.before.release()
    last = parts.last_call
    for number in range(last + 1):
        unit = parts.call(number)
        unit.bucket.gathered()
        record.computes("forward", unit.name)
        parts.ahead[number].start_gather()
        for batch in turns.of(number):
            batch.forward(number, unit, keep=keep)
            if number < last:
                batch.resume(number)
        if number < last and parts.bucket(number + 1) is not unit.bucket:
            unit.bucket.release()


def head(
    parts: Parts, turns: Turns, scale: torch.Tensor | None, begun: Begun
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Head and loss of one micro-batch after the other, so that one's logits are alive at a time.

    Args:
        scale: with it, backward from loss x scale follows each loss; without, no backward.
        begun: of what there are gradients already.

    Returns:
        (summed loss, count) of each micro-batch, without graph.
    """
    parts.after.gathered()
    parts.record.computes("head", ROOT)
    if scale is not None:
        begun.begin(*parts.throughout, parts.before, parts.after)
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


def backward(
    parts: Parts,
    turns: Turns,
    reductions: Reductions | None,
    begun: Begun,
    *,
    splits: bool = False,
) -> None:
    """All micro-batches backward through all units; starts to reduce each bucket's gradient once it
    is done, or leaves it for others to be added.

    Args:
        reductions: None if others follow in the same step.
        begun: of what there are gradients already.
        splits: whether the gradients of units' parameters are left to `weights`.
    """
    begun.begin(*parts.throughout, parts.before, parts.after)
    if reductions is not None:
        begun.reduce(parts.after, reductions)
    for number in _back_through(parts, None if splits else reductions, begun, adds=not splits):
        turn = turns.of(number)
        for place, batch in enumerate(turn):
            if place + 1 < len(turn):
                turn[place + 1].prefetch(number)
            elif number:
                turns.of(number - 1)[0].prefetch(number - 1)
            batch.backward(number, splits=splits)


def weights(parts: Parts, turns: Turns, reductions: Reductions | None, begun: Begun) -> None:
    """What `backward` has left to be done of all micro-batches; reduces as that does."""
    if reductions is not None and not begun.reduced(parts.after):
        begun.reduce(parts.after, reductions)
    for number in _back_through(parts, reductions, begun):
        for batch in turns.of(number):
            batch.backward_weights(number)


def _back_through(
    parts: Parts, reductions: Reductions | None, begun: Begun, *, adds: bool = True
) -> Iterator[int]:
    """The unit calls, last first, each while its parameters are here.

    Args:
        adds: whether there will be something in the gradients of its bucket.
    """
    reduced_after = parts.reduced_after
    for number in reversed(range(parts.last_call + 1)):
        unit = parts.call(number)
        bucket = unit.bucket
        bucket.gathered()
        parts.record.computes("backward", unit.name)
        behind = parts.behind[number]
        if behind is not None:
            behind.start_gather()
        if adds:
            begun.begin(bucket)
        yield number
        if not number or parts.bucket(number - 1) is not bucket:
            bucket.release()
        if reductions is not None and number in reduced_after:
            begun.reduce(bucket, reductions)


def finish(
    stages: Sequence[Parts],
    reductions: Reductions,
    begun: Begun,
    *,
    shared: Sequence[Bucket] = (),
) -> None:
    """Start to reduce what has not been, and wait for all reductions.

    Args:
        shared: what these stages have together with others. It is last, in an order that all ranks
            keep: each has other stages, and by their order ranks would wait for each other.
    """
    for parts in stages:
        after = parts.reduced_after
        units = [after[number] for number in sorted(after, reverse=True)]
        for bucket in (parts.after, *units, parts.root, parts.before):
            if not begun.reduced(bucket):
                begun.reduce(bucket, reductions)
    for bucket in shared:
        begun.reduce(bucket, reductions)
    reductions.finish()
    stages[0].record.overhead()
