"""Buckets: parameters all-gathered and reduce-scattered together. A bucket is a unit, several small
units, or a part of the root.

A bucket is a small state machine driven by the schedule. Reductions begin in the same order on
every rank and end in that order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from gpumix.engine.comm import collective_progress
from gpumix.engine.comm.communicator import Pending
from gpumix.engine.comm.step_recorder import SILENT
from gpumix.engine.sharding.absent_parameter import get_own_gradient, refuse_frozen_or_thawed
from gpumix.engine.sharding.flat_group import FlatGroup
from gpumix.engine.sharding.gradient_fingerprint import See
from gpumix.engine.sharding.shard import Piece, Scale
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.schema.plan.step_trace import Work
from gpumix.schema.profile.profile import ROOT

# Sampled elements of each row of gradients.
ROW_NUMEL, SAMPLED_NUMEL = 4096, 512


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
        layout: ShardLayout,
        arrivals: GatherBuffer | None = None,
    ) -> None:
        self.name = name
        self.groups = list(groups)
        self.trainable = [group for group in self.groups if group.trainable]
        self.see: See | None = None  # called with this rank's gradients before the reduction
        # Identities of the storages that contain the gathered parameters.
        self.storages = frozenset(group.full.untyped_storage()._cdata for group in self.groups)
        self._recorder = layout.comm.recorder
        self._arrivals = arrivals
        self._resident = layout.whole_parameters
        self._ever_gathered = False
        self._gathering: list[Pending] | None = None
        self._reducing: list[Pending] | None = None
        self._reductions = [group.make_reduction() for group in self.trainable]
        shards = [shard for group in self.groups for shard in group.shards]
        self._read_late = [shard for shard in shards if shard.is_read_late]
        self._sums_in_place = [shard for shard in shards if shard.sums_in_place]
        self._places = [place for group in self.groups for place in group.places]
        self._at_rest = [place for group in self.groups for place in group.at_rest]
        self._packed = [packed for group in self.groups for packed in group.packed]
        self._recast = [recast for group in self.groups for recast in group.recast]
        # Between steps, modules have parameters with the masters' values, of some groups at least.
        self._is_whole = any(group.is_whole for group in self.groups)
        self._remove()
        self._rest()

    @property
    def pieces(self) -> list[Piece]:
        return [piece for group in self.groups for piece in group.pieces]

    # -- parameters ---------------------------------------------------------------------------

    def begin_step(self, *, trains: bool) -> None:
        """Begin a step: no parameter has a gradient yet, or may be used before being gathered.

        Args:
            trains: False for an evaluation, in which parameters may be frozen, as those of adapters
                that are switched off are.

        Raises:
            InputError: parameters were frozen or thawed since the model was sharded, or have
                gradients of a foreign backward pass.
        """
        with torch._C.DisableTorchFunctionSubclass():  # which takes most of the time of the checks
            for group in self.groups:
                group.unused, trained = group.trained, group.trainable
                for *_, rest in group.at_rest:
                    if (
                        (trains and rest.requires_grad is not trained)
                        or rest.data_ptr() != rest.place
                        or get_own_gradient(rest) is not None
                    ):
                        rest.refuse_changes(trained=trained if trains else rest.requires_grad)
                for *_, away in group.places if trains and not group.is_whole else ():
                    if away.requires_grad is not trained:
                        refuse_frozen_or_thawed(away, trained=trained)
        if self._is_whole:
            self._remove()

    def round_ahead(self) -> None:
        """Round masters on the host ahead in a step: they stay unchanged until gathered."""
        for shard in self._read_late:
            shard.round_ahead()

    def take_turn(
        self,
        kind: Work,
        unit: str,
        left: Bucket | None = None,
        ahead: Bucket | None = None,
        begun: GradientProgress | None = None,
    ) -> None:
        """Gather the parameters for a unit's work and wait for arrival.

        Args:
            left: bucket whose parameters are released before.
            ahead: bucket whose parameters are needed next; their gather starts.
            begun: if given, the bucket's gradient begins.
        """
        if left is not None:
            left.release()
        self.start_gather()
        self.arrived()
        self.note_work(kind, unit)
        if ahead is not None:
            ahead.start_gather()
        if begun is not None:
            begun.begin(self)

    def note_work(self, kind: Work, unit: str) -> None:
        """Note work that begins, for reports of failures and for traces."""
        collective_progress.compute_phase = kind, unit if unit != ROOT else ""
        if (record := self._recorder.now) is not SILENT:
            record.computes(kind, unit)

    def start_gather(self) -> None:
        """Start to gather the parameters, unless the gather is under way or done."""
        if self._gathering is not None:
            return
        if self._arrivals is not None:
            self._arrivals.take(self)
        self._gathering = []
        for group in self.groups:  # one by one, so that started gathers are known if the next fails
            if not self._ever_gathered or not self._resident or group.diverges:
                for gather in group.gathers:
                    self._gathering.append(gather())
                if group.arriving is not None:
                    self._gathering[-1].then(group.take)
        self._ever_gathered = True
        if (record := self._recorder.now) is not SILENT:
            record.issued("gather", self.name, self._gathering)
        if not self._gathering:
            self.install()

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
                if not pending.is_over:
                    pending.wait()
            self._gathering = []
            self.install()

    def install(self) -> None:
        """Install the arrived parameters in the modules. Earlier use would read stale values."""
        for parameters, attribute, view, _ in self._places:
            parameters[attribute] = view
        for view, values in self._recast:
            view.data = values
        for packed in self._packed:
            packed.install()

    def gathered_apart(self) -> None:
        """Gather the parameters and wait for arrival, in memory of their own until `leave`, if
        other buckets share the bucket's memory."""
        self.gathered()
        if not self._resident:
            for group in self.groups:
                group.install_copies()

    def release(self) -> None:
        """Release the parameters until the next gather; resident parameters stay."""
        if not self._resident and self._gathering is not None:
            self._remove()

    def values_changed(self) -> None:
        """Mark the gathered values as outdated, because trained and frozen values changed."""
        self._ever_gathered = False

    def leave(self) -> None:
        """Release the parameters until the next step, before which masters may change."""
        if self._gathering is not None:
            self._remove()
        self._rest()
        for shard in self._read_late:
            shard.may_change()

    def _remove(self) -> None:
        """Install placeholders in the modules until the next gather: the parameters are away."""
        for parameters, attribute, _, away in self._places:
            parameters[attribute] = away
        for packed in self._packed:
            packed.remove()
        self._gathering = None

    def _rest(self) -> None:
        """Install parameters with the masters' values in the modules between steps, if this rank
        has all masters."""
        for parameters, attribute, rest in self._at_rest:
            parameters[attribute] = rest
        for packed in self._packed:
            packed.rest()

    # -- gradients ----------------------------------------------------------------------------

    def begin_gradient(self) -> None:
        """Begin the gradient of a step: the buffer counts as empty, but gradients left by earlier
        steps are saved, to be added."""
        for group in self.trainable:
            group.receiving.now = True
        for shard in self._sums_in_place:
            shard.begin_gradient()
        for group in self.trainable:
            for gradient in group.gradients:
                gradient.view.grad = None

    def end_gradient(self) -> None:
        """Set missing gradients to zero, and note their parameters."""
        for group in self.trainable:
            group.receiving.now = False
            absent = set()
            for gradient in group.gradients:
                if gradient.view.grad is None:
                    gradient.view.grad = gradient.place.zero_()
                    absent.add(gradient.name)
            group.unused &= absent

    def start_reduce(self, scale: Scale | None) -> None:
        """Start to sum the gradients over ranks; see `FlatGroup.make_reduction`."""
        self.end_gradient()
        if self.see is not None and self.trainable:
            self.see(self.name, [group.gradient for group in self.trainable])
        self._reducing = [pending for reduce in self._reductions for pending in reduce(scale)]
        if (record := self._recorder.now) is not SILENT:
            record.issued("reduce", self.name, self._reducing)

    def advance(self) -> bool:
        """Wait for the current collectives of the reduction and start the next. Returns True once
        all are done and this rank's part of the gradient is in the pieces."""
        if self._reducing is None:
            return True
        if (record := self._recorder.now) is not SILENT:
            record.waits("reduce", self.name)
        for pending in self._reducing:
            pending.wait()
        started = [one.following() for one in self._reducing if one.following is not None]
        self._reducing = started or None
        return self._reducing is None

    def settle(self, scale: Scale) -> None:
        """Multiply the sums with `scale` to get the gradients, after all reductions without a
        scale."""
        for group in self.trainable:
            group.settle(scale)

    def abandon(self) -> None:
        """Discard all state of a step that failed half-way."""
        self._reducing = None
        for group in self.trainable:
            group.forget_sums()
        self.leave()


def begin_step(buckets: Sequence[Bucket], *, trains: bool = True) -> None:
    """Begin a step of all buckets; see `Bucket.begin_step`."""
    for bucket in buckets:
        bucket.begin_step(trains=trains)


def release_buckets(buckets: Sequence[Bucket]) -> None:
    """Release the parameters of all buckets after a step; the optimizer may change them."""
    for bucket in buckets:
        bucket.leave()


def gather_buckets(buckets: Sequence[Bucket], ahead: Bucket) -> None:
    """Gather all `buckets`, for the root's forward, and start to gather the bucket `ahead`."""
    for bucket in (*buckets, ahead):
        bucket.start_gather()
    for bucket in buckets:
        bucket.arrived()
    ahead.note_work("forward", ROOT)


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


@dataclass
class BucketReductions:
    """The reductions of a step, in the order in which buckets are done.

    Attributes:
        scale: factor of the sums; None: `settle` applies it later.
        at_once: whether reductions overlap, which requires separate buffers.
        done: called with each bucket whose gradient is in its pieces.
    """

    scale: Scale | None
    at_once: bool
    done: Callable[[Bucket], None] | None = None
    _under_way: list[Bucket] = field(default_factory=list, init=False)

    def start(self, bucket: Bucket) -> None:
        if not self.at_once:
            self._advance()
        bucket.start_reduce(self.scale)
        self._under_way.append(bucket)

    def finish(self) -> None:
        """Wait for all reductions."""
        while self._under_way:
            self._advance()

    def _advance(self) -> None:
        left = []
        for bucket in self._under_way:
            if not bucket.advance():
                left.append(bucket)
            elif self.done is not None:
                self.done(bucket)
        self._under_way = left


@dataclass
class GradientProgress:
    """Progress of the gradients of each bucket in a step."""

    _begun: set[int] = field(default_factory=set)
    _reduced: set[int] = field(default_factory=set)

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

    def finish(
        self, buckets: Sequence[Bucket], shared: Sequence[Bucket], reductions: BucketReductions
    ) -> None:
        """Start to reduce the gradients of all `buckets` that are not being reduced, then those of
        `shared` ones; wait for all reductions."""
        for bucket in buckets:
            if not self.reduced(bucket):
                self.reduce(bucket, reductions)
        for bucket in shared:
            self.reduce(bucket, reductions)
        reductions.finish()

    def reduced(self, bucket: Bucket) -> bool:
        """Return whether all accumulated gradients of the bucket are being reduced."""
        return id(bucket) in self._reduced


class SampledGradientNorm:
    """Norm of a sample of the gradients, over all buckets of a step. It covers `SAMPLED_NUMEL`
    elements in each `ROW_NUMEL`, so that little memory is read, and all of tensors shorter than a
    row."""

    def __init__(self, device: torch.device) -> None:
        self._norms: list[torch.Tensor] = []
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of buffers, by identity
        self._nothing = torch.zeros((), device=device)

    def see(self, bucket: str, gradients: Sequence[torch.Tensor]) -> None:
        # By row: for a non-contiguous part, torch is as slow as for the full tensor.
        for one in gradients:
            if id(one) not in self._parts:
                self._parts[id(one)] = one, _sample_rows(one)
            self._norms.append(torch.linalg.vector_norm(self._parts[id(one)][1], dim=1))

    def take(self) -> torch.Tensor:
        """Return the norm of gradients seen since the last call."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.cat(norms)) if norms else self._nothing


def _sample_rows(gradient: torch.Tensor) -> torch.Tensor:
    rows = gradient.numel() // ROW_NUMEL
    return (
        gradient[: rows * ROW_NUMEL].view(rows, ROW_NUMEL)[:, :SAMPLED_NUMEL]
        if rows
        else gradient[None]
    )
