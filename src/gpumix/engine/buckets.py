"""Buckets: what is gathered and reduced as one. A unit, several small ones, or a part of the root.

A bucket is a small state machine, told by the schedule what comes next. Reductions begin in the
same order on every rank and end in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from gpumix.engine.arrivals import Arrivals
from gpumix.engine.comm import Pending
from gpumix.engine.division import Division
from gpumix.engine.own_gradients import See
from gpumix.engine.shard import Piece, Scale
from gpumix.engine.shards import FlatGroup, storage_of


class Bucket:
    """Flat groups that are gathered and reduced together.

    Args:
        name: in messages and recordings: the first of its units.
        arrivals: where the parameters arrive, if that is not where they are used.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[FlatGroup],
        division: Division,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.name = name
        self.groups = list(groups)
        self._comm = division.comm
        self._arrivals = arrivals
        self.see: See | None = None  # is told of this rank's gradients before they are reduced
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
        """The storages that the parameters lie in when they are gathered, by identity."""
        return frozenset(storage_of(group.full) for group in self.groups)

    # -- parameters ---------------------------------------------------------------------------

    def round_ahead(self) -> None:
        """A step begins: have ready what will be gathered of masters on the host."""
        for group in self.trainable:
            group.round_ahead()

    def start_gather(self) -> None:
        """Start to gather the parameters, unless that is under way or done."""
        if self._gathering is not None:
            return
        if self._arrivals is not None:
            self._arrivals.take(self)
        self._gathering = []
        for group in self.groups:  # one by one: what has begun is known if the next one fails
            if not self._ever_gathered or not self._resident or group.diverges:
                self._gathering += group.gather()
        self._ever_gathered = True
        self._comm.record.issued("gather", self.name, self._gathering)
        if not self._gathering:
            self._install()

    def gathered(self) -> None:
        """Wait until the parameters are here."""
        self.start_gather()
        self.arrived()

    def arrived(self) -> None:
        """Wait for the gather, if one is under way."""
        if self._gathering:
            self._comm.record.waits("gather", self.name)
            for pending in self._gathering:
                pending.wait()
            self._gathering = []
            self._install()

    def _install(self) -> None:
        """Only now: who used a parameter while it is still on its way would compute with what was
        there before."""
        for group in self.groups:
            group.install()

    def release(self) -> None:
        """The parameters are not needed until the next gather; resident ones stay."""
        if not self._resident:
            self._put_away()

    def values_changed(self) -> None:
        """What is trained and what is frozen differs from what was gathered."""
        self._ever_gathered = False

    def begin_step(self) -> None:
        """A step begins, or another pass through the model; see `FlatGroup.begin_step`."""
        for group in self.groups:
            group.begin_step()

    def leave(self) -> None:
        """The parameters are not needed until the next step, which may find others in masters."""
        self._put_away()
        for group in self.groups:
            group.rest()
        for group in self.trainable:
            group.may_change()

    def _put_away(self) -> None:
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
        self._reduction = _together([group.reduce(scale) for group in self.trainable])
        self._reducing = next(self._reduction, [])
        self._comm.record.issued("reduce", self.name, self._reducing)

    def advance(self) -> bool:
        """Wait for the collective of the reduction that is under way, and start the next one; or,
        if there is none, this rank's part of the gradient is in its pieces: then True."""
        if self._reduction is None:
            return True
        self._comm.record.waits("reduce", self.name)
        for pending in self._reducing:
            pending.wait()
        following = next(self._reduction, None)
        self._reducing = following or []
        if following is None:
            self._reduction = None
        return following is None

    def settle(self, scale: Scale) -> None:
        """All reductions without a scale are done: their sum, times this one, is the gradient."""
        for group in self.trainable:
            group.settle(scale)

    def abandon(self) -> None:
        """Leave nothing of a step that failed half-way."""
        self._reducing, self._reduction = [], None
        for group in self.trainable:
            group.forget_sums()
        self.leave()


def _together(reductions: Sequence[Iterator[list[Pending]]]) -> Iterator[list[Pending]]:
    """The n-th collectives of all of them at once."""
    while started := [pending for one in reductions for pending in next(one, [])]:
        yield started


class Reductions:
    """The reductions of one step, in the order in which buckets are done.

    Args:
        scale: None: they are settled later.
        at_once: whether one may begin before the last one ended: where each has its own buffers.
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
        """Wait for all of them."""
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
