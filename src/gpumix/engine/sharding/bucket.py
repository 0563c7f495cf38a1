"""Buckets: parameters all-gathered and reduce-scattered together. A bucket is a unit, several small
units, or a part of the root.

A bucket is a small state machine driven by the schedule. Reductions begin in the same order on
every rank and end in that order.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import torch

from gpumix.engine.comm.communicator import Pending
from gpumix.engine.comm.step_recorder import SILENT
from gpumix.engine.sharding.flat_group import FlatGroup, storage_of
from gpumix.engine.sharding.gradient_fingerprint import See
from gpumix.engine.sharding.shard import Piece, Scale
from gpumix.engine.sharding.shard_layout import Division


class Bucket:
    """Flat groups that are gathered and reduced together.

    Args:
        name: name in messages and recordings: the first unit's.
        arrivals: where parameters arrive, if not where they are used.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[FlatGroup],
        division: Division,
        arrivals: GatherBuffer | None = None,
    ) -> None:
        self.name = name
        self.groups = list(groups)
        self._recorder = division.comm.recorder
        self._arrivals = arrivals
        self.see: See | None = None  # called with this rank's gradients before the reduction
        self._resident = division.whole_parameters
        self._ever_gathered = False
        self._gathering: list[Pending] | None = None
        self._reduction: Iterator[list[Pending]] | None = None
        self._reducing: list[Pending] = []

    @property
    def pieces(self) -> list[Piece]:
        return [piece for group in self.groups for piece in group.pieces]

    @cached_property
    def trainable(self) -> list[FlatGroup]:
        return [group for group in self.groups if group.trainable]

    @cached_property
    def storages(self) -> frozenset[int]:
        """Identities of the storages that contain the gathered parameters."""
        return frozenset(storage_of(group.full) for group in self.groups)

    # -- parameters ---------------------------------------------------------------------------

    def round_ahead(self) -> None:
        """Prepare the gathers from masters on the host, at the start of a step."""
        for group in self.trainable:
            group.round_ahead()

    def start_gather(self) -> None:
        """Start to gather the parameters, unless the gather is under way or done."""
        if self._gathering is not None:
            return
        if self._arrivals is not None:
            self._arrivals.take(self)
        self._gathering = []
        for group in self.groups:  # one by one, so that started gathers are known if the next fails
            if not self._ever_gathered or not self._resident or group.diverges:
                self._gathering += group.gather()
        self._ever_gathered = True
        if (record := self._recorder.now) is not SILENT:
            record.issued("gather", self.name, self._gathering)
        if not self._gathering:
            self._install()

    def gathered(self) -> None:
        """Gather the parameters and wait for arrival."""
        self.start_gather()
        self.arrived()

    def arrived(self) -> None:
        """Wait for the gather, if under way."""
        if self._gathering:
            if (record := self._recorder.now) is not SILENT:
                record.waits("gather", self.name)
            for pending in self._gathering:
                pending.wait()
            self._gathering = []
            self._install()

    def _install(self) -> None:
        """Install the arrived parameters. Earlier use would read stale values."""
        for group in self.groups:
            group.install()

    def gathered_apart(self) -> None:
        """Gather the parameters and wait for arrival, in memory of their own until `leave`, if
        other buckets share the bucket's memory."""
        self.gathered()
        if not self._resident:
            for group in self.groups:
                group.install_copies()

    def release(self) -> None:
        """Release the parameters until the next gather; resident parameters stay."""
        if not self._resident:
            self._remove_parameters()

    def values_changed(self) -> None:
        """Mark the gathered values as outdated, because trained and frozen values changed."""
        self._ever_gathered = False

    def leave(self) -> None:
        """Release the parameters until the next step, before which masters may change."""
        self._remove_parameters()
        for group in self.groups:
            group.rest()
            group.may_change()

    def _remove_parameters(self) -> None:
        if self._gathering is None:
            return
        for group in self.groups:
            group.remove()
        self._gathering = None

    # -- gradients ----------------------------------------------------------------------------

    def begin_gradient(self) -> None:
        for group in self.trainable:
            group.begin_gradient()

    def start_reduce(self, scale: Scale | None) -> None:
        """Start to sum the gradients over ranks; see `FlatGroup.reduce`."""
        for group in self.trainable:
            group.end_gradient()
        if self.see is not None and self.trainable:
            self.see(self.name, [group.gradient for group in self.trainable])
        reductions = [group.reduce(scale) for group in self.trainable]
        self._reduction = reductions[0] if len(reductions) == 1 else _zip_collectives(reductions)
        self._reducing = next(self._reduction, [])
        if (record := self._recorder.now) is not SILENT:
            record.issued("reduce", self.name, self._reducing)

    def advance(self) -> bool:
        """Wait for the current collective of the reduction and start the next. Returns True once
        all are done and this rank's part of the gradient is in the pieces."""
        if self._reduction is None:
            return True
        if (record := self._recorder.now) is not SILENT:
            record.waits("reduce", self.name)
        for pending in self._reducing:
            pending.wait()
        following = next(self._reduction, None)
        self._reducing = following or []
        if following is None:
            self._reduction = None
        return following is None

    def settle(self, scale: Scale) -> None:
        """Multiply the sums with `scale` to get the gradients, after all reductions without a
        scale."""
        for group in self.trainable:
            group.settle(scale)

    def abandon(self) -> None:
        """Discard all state of a step that failed half-way."""
        self._reducing, self._reduction = [], None
        for group in self.trainable:
            group.forget_sums()
        self.leave()


class GatherBuffer:
    """Receive buffer of all-gathers on a rank with a compute dtype unlike the communication dtype:
    memory for the largest bucket's parameters. Buckets arrive here one after another, and each is
    cast into its own memory.

    All ranks all-gather in the plan's communication dtype, so that all compute with equal values. A
    rank that computes in this dtype gathers straight into its flat buffers and needs none.

    Args:
        sizes: bytes of each bucket's flat groups.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], device: torch.device) -> None:
        size = max(map(sum, sizes), default=0)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        # Weak, because the bucket references this object and neither may outlive the engine.
        self._last: weakref.ref[Bucket] | None = None

    def cut(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return views of the memory for the flat groups of a bucket."""
        return [self._memory[end - size : end] for size, end in zip(sizes, accumulate(sizes))]

    def take(self, bucket: Bucket) -> None:
        """Claim the memory for `bucket`, after waiting for the previous bucket. Several gathers are
        in flight only at the start of a step, so the wait costs nothing."""
        last = self._last() if self._last is not None else None
        if last is not None and last is not bucket:
            last.arrived()
        self._last = weakref.ref(bucket)


def _zip_collectives(reductions: Sequence[Iterator[list[Pending]]]) -> Iterator[list[Pending]]:
    """Yield the n-th collectives of all reductions together."""
    while started := [pending for one in reductions for pending in next(one, [])]:
        yield started


class BucketReductions:
    """The reductions of a step, in the order in which buckets are done.

    Args:
        scale: factor of the sums; None: `settle` applies it later.
        at_once: whether reductions overlap, which requires separate buffers.
        done: called with each bucket whose gradient is in its pieces.
    """

    def __init__(
        self,
        scale: Scale | None,
        *,
        at_once: bool,
        done: Callable[[Bucket], None] | None = None,
    ) -> None:
        self._scale = scale
        self._at_once = at_once
        self._done = done
        self._under_way: deque[Bucket] = deque()

    def start(self, bucket: Bucket) -> None:
        if not self._at_once:
            self._advance()
        bucket.start_reduce(self._scale)
        self._under_way.append(bucket)

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._under_way:
            self._advance()

    def _advance(self) -> None:
        left: deque[Bucket] = deque()
        for bucket in self._under_way:
            if not bucket.advance():
                left.append(bucket)
            elif self._done is not None:
                self._done(bucket)
        self._under_way = left


class GradientProgress:
    """Progress of the gradients of each bucket in a step."""

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._reduced: set[int] = set()

    def begin(self, *buckets: Bucket) -> None:
        """Prepare the buckets' gradients for accumulation."""
        for bucket in buckets:
            if id(bucket) not in self._begun:
                self._begun.add(id(bucket))
                self._reduced.discard(id(bucket))
                bucket.begin_gradient()

    def reduce(self, bucket: Bucket, reductions: BucketReductions) -> None:
        """Start to reduce the bucket's gradients."""
        self.begin(bucket)
        self._begun.discard(id(bucket))
        self._reduced.add(id(bucket))
        reductions.start(bucket)

    def reduce_rest(self, buckets: Sequence[Bucket], reductions: BucketReductions) -> None:
        """Start to reduce the gradients of all `buckets` that are not being reduced."""
        for bucket in buckets:
            if not self.reduced(bucket):
                self.reduce(bucket, reductions)

    def reduced(self, bucket: Bucket) -> bool:
        """Return whether all accumulated gradients of the bucket are being reduced."""
        return id(bucket) in self._reduced
