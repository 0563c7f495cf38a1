"""Duration of a plan's collectives, and the form of each.

`CollectiveSeconds` maps bucket names (`cost.network.buckets`) to the seconds of each gather and
reduction, taken from a `LinkModel`: measured over the ranks that ran, or computed from stated
links. As in `engine.comm`, a buffer with equal intervals uses the backend's native collective where
available; all others use the form named by the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Self

from gpumix.cost.memory_layout.curves import interpolate_one_seconds
from gpumix.cost.network.buckets import (
    BEFORE,
    GRADIENT_BYTES,
    ONE_UNIT_PER_BUCKET,
    BucketGrouping,
    Buckets,
    UnitSize,
    build_buckets,
)
from gpumix.cost.network.link_times import LinkModel, Operation
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Collectives, Sharding, ZeroStage
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype, Place
from gpumix.schema.profile.profile import ROOT, ClassProfile, Profile, RankGroup


@dataclass(frozen=True)
class BufferCuts:
    """Cuts of buffers into one interval for each of `ranks`: at `shares`, or equal where the ranks
    divide the buffer (`even`), or never equal. Cuts are at multiples of `multiple` elements."""

    ranks: int
    even: bool = False
    shares: tuple[float, ...] = ()
    multiple: int = 1

    @classmethod
    def alike(cls, ranks: int, multiple: int = 1) -> Self:
        """Return cuts for equal shares."""
        return cls(ranks, even=True, multiple=multiple)

    @classmethod
    def unlike(cls, ranks: int) -> Self:
        """Return cuts for shares that differ a lot."""
        return cls(ranks, even=ranks == 1)

    @classmethod
    def at(cls, shares: tuple[float, ...], multiple: int = 1) -> Self:
        """Return cuts at the given share of each rank."""
        return cls(len(shares), max(shares) == min(shares), shares, multiple)

    def equal(self, numel: int) -> bool:
        """Check if a buffer of `numel` elements is cut into equal intervals."""
        if self.even:
            return numel % (self.ranks * self.multiple) == 0 or self.ranks == 1
        if self.multiple > 1:
            return False
        # Rounding moves each end of an interval by half an element at most.
        if not self.shares or (max(self.shares) - min(self.shares)) * numel > 2:
            return False
        return len(set(compute_shard_sizes(numel, self.shares))) == 1


@dataclass(frozen=True)
class ShardedLayout:
    """Layout of the sharded state: ZeRO stage, ranks, collectives, cuts and buckets.

    Where each host divides the whole state, the cuts are those of any of `hosts` hosts, and `alike`
    says if all hosts cut equally. With `parameters_on` hosts, devices of `classes` copy from there.
    """

    zero_stage: ZeroStage
    sharding: Sharding
    collectives: Collectives
    cuts: BufferCuts
    communication_dtype: ComputeDtype
    joining: BucketGrouping = ONE_UNIT_PER_BUCKET
    hosts: int = 1
    alike: bool = False
    parameters_on: Place = "device"
    classes: tuple[str, ...] = ()

    @property
    def group(self) -> RankGroup:
        """Group of ranks that gathers parameters."""
        return "inside" if self.sharding == "host" else "all"


@dataclass(frozen=True)
class CollectiveSeconds:
    """Seconds of each collective by bucket, and the buckets needing a receive buffer.

    `gather_s` is for the forward pass, `regather_s` for the backward pass, `reduce_s` for
    everything done to a gradient. `contention` is the mutual slowdown of a collective and
    computation. `padding_bytes` is the memory of padded collectives besides the units' own buffers.
    `copied_rows` is the number of own intervals that a rank needs to sum its gradient over hosts.
    Without `communication_dtype`, parameters are gathered in each rank's compute dtype.

    With `parameters_on` hosts, gathers and reductions are copies over each device's own link, both
    ways at the same time: `by_class` has those of each device class, and these are the slowest.
    `update_s` is then the time of updates by the host, where these overlap with the backward pass.
    """

    buckets: Buckets
    gather_s: Mapping[str, float]
    regather_s: Mapping[str, float]
    reduce_s: Mapping[str, float]
    all_to_all: frozenset[str] = frozenset()
    contention: float = 0.0
    padding_bytes: int = 0
    copied_rows: int = 0
    communication_dtype: ComputeDtype | None = None
    parameters_on: Place = "device"
    by_class: Mapping[str, CollectiveSeconds] = field(default_factory=dict)
    update_s: Mapping[str, float] = field(default_factory=dict)

    def of_class(self, name: str) -> CollectiveSeconds:
        """Return the collectives as a device of class `name` takes part in them."""
        return self.by_class.get(name, self)

    def backward_s(self, gathered: str, reduced: str) -> float:
        """Return the seconds to gather one bucket and to reduce another in the backward pass."""
        gather, reduce = self.regather_s.get(gathered, 0.0), self.reduce_s.get(reduced, 0.0)
        if self.parameters_on == "device":
            return gather + reduce
        return max(gather, reduce, self.update_s.get(reduced, 0.0))

    @cached_property
    def times(self) -> Hashable:
        """All seconds of these collectives; equal for equally fast links."""
        every = (self.gather_s, self.regather_s, self.reduce_s, self.update_s)
        seconds = tuple(tuple(of_kind.items()) for of_kind in every)
        return self.parameters_on, self.contention, seconds

    @cached_property
    def idle_pass_s(self) -> tuple[float, float]:
        """Seconds of both passes of a rank without samples: it waits for collectives."""
        forward, backward = self.gather_s[self.buckets.kind(0)], 0.0
        for overlap, count in self.buckets.forward_counts:
            forward += count * self.gather_s.get(overlap.gathered, 0.0)
        for overlap, count in self.buckets.backward_counts:
            backward += count * self.backward_s(overlap.gathered, overlap.reduced)
        return forward, backward

    @property
    def is_free(self) -> bool:
        """Flag: all collectives take zero seconds."""
        every = (self.gather_s, self.regather_s, self.reduce_s)
        return not any(any(seconds.values()) for seconds in every)

    def without_gathers(self) -> CollectiveSeconds:
        """Return the seconds of a forward pass whose parameters are gathered already."""
        return replace(self, gather_s=dict.fromkeys(self.gather_s, 0.0), by_class={})

    def averaged_over(self, waves: float, *, gathers_once: bool) -> CollectiveSeconds:
        """Return the seconds of a wave on average, if only the first of `waves` waves gathers what
        stays gathered: the root's parameters, and all parameters if `gathers_once`. As a step grows
        by the longer of gather and computation, it takes no less than with these averages."""
        if waves == 1.0 or self.parameters_on == "host":
            return self
        once = self.gather_s if gathers_once else (ROOT,)
        averages = {name: self.gather_s[name] / waves for name in once}
        return replace(self, gather_s={**self.gather_s, **averages})


def compute_collective_seconds(
    profile: Profile, wire: LinkModel, layout: ShardedLayout
) -> CollectiveSeconds:
    """Return the collectives of a plan with state divided by `layout`.

    Raises:
        InputError: nothing is known of a required form.
    """
    moves, buckets = _LayoutCollectives(wire, layout), _buckets_of(profile, layout)
    sizes = buckets.sizes
    if layout.parameters_on == "host":
        return _compute_host_copies(profile, moves, layout, buckets)
    gather = {name: moves.gather_s(size) for name, size in sizes.items()}
    none = dict.fromkeys(sizes, 0.0)
    if layout.cuts.ranks == 1 and layout.sharding == "all":
        return replace(
            make_free_collectives(buckets), communication_dtype=layout.communication_dtype
        )
    return CollectiveSeconds(
        buckets,
        gather_s=none if layout.zero_stage == 0 else gather,
        regather_s=gather if layout.zero_stage == 3 else none,
        reduce_s={name: moves.reduce_s(size) for name, size in sizes.items()},
        all_to_all=frozenset(n for n, s in sizes.items() if moves.needs_receive_buffer(s)),
        contention=profile.contention,
        padding_bytes=moves.padding_bytes(buckets),
        copied_rows=moves.copied_rows,
        communication_dtype=layout.communication_dtype,
    )


def _compute_host_copies(
    profile: Profile, moves: _LayoutCollectives, layout: ShardedLayout, buckets: Buckets
) -> CollectiveSeconds:
    """Return the copies between devices and hosts that have all parameters, by device class, and
    the slowest of them."""
    every = {
        name: _copies_of_class(profile.of_class(name), moves, layout, buckets)
        for name in layout.classes
    }

    def slowest(of: Callable[[CollectiveSeconds], Mapping[str, float]]) -> dict[str, float]:
        return {
            name: max(of(one).get(name, 0.0) for one in every.values()) for name in buckets.sizes
        }

    updates = {} if not profile.updates_early else slowest(lambda one: one.update_s)
    of_all = CollectiveSeconds(
        buckets,
        gather_s=slowest(lambda one: one.gather_s),
        regather_s=slowest(lambda one: one.regather_s),
        reduce_s=slowest(lambda one: one.reduce_s),
        copied_rows=moves.copied_rows,
        communication_dtype=layout.communication_dtype,
        parameters_on="host",
        update_s=updates,
    )
    # Every rank's updates are waited for.
    return replace(
        of_all,
        by_class={
            name: replace(
                of_all,
                gather_s=one.gather_s,
                regather_s=one.regather_s,
                reduce_s=one.reduce_s,
            )
            for name, one in every.items()
        },
    )


def _copies_of_class(
    device: ClassProfile, moves: _LayoutCollectives, layout: ShardedLayout, buckets: Buckets
) -> CollectiveSeconds:
    assert device.host_copy is not None, "copies to the host were not measured"
    assert device.host_optimizer_s_per_element is not None, "no state on the host was measured"
    shares = layout.cuts.shares or (1.0 / layout.cuts.ranks,)
    copy, width = device.host_copy, DTYPE_BYTES[layout.communication_dtype]
    gather, regather, reduce, update = {}, {}, {}, {}
    for name, size in buckets.sizes.items():
        parameters = size.trainable * width + size.frozen_bytes
        regather[name] = interpolate_one_seconds(copy, parameters) if parameters else 0.0
        gather[name] = regather[name] + (moves.meeting_s("gather") if parameters else 0.0)
        gradient = interpolate_one_seconds(copy, size.gradient_bytes) if size.trainable else 0.0
        rows = max(shares) * layout.cuts.ranks * size.gradient_bytes
        reduce[name] = gradient + rows * (device.host_sum_s_per_byte or 0.0)
        if size.trainable:
            reduce[name] += moves.meeting_s("reduce") + moves.over_hosts_s(size)
        update[name] = device.host_optimizer_s_per_element * size.trainable * max(shares)
    return CollectiveSeconds(buckets, gather, regather, reduce, update_s=update)


def _buckets_of(profile: Profile, layout: ShardedLayout) -> Buckets:
    """Return the buckets as gathered. Only frozen parameters depend on the dtype; without a
    measurement in the communication dtype, their measured size is used."""
    known = {m.compute_dtype: m for m in (profile.model, *profile.other_models)}
    return build_buckets(known.get(layout.communication_dtype, profile.model), layout.joining)


def make_free_collectives(buckets: Buckets) -> CollectiveSeconds:
    """Return collectives without time or memory: for one rank, or without a network."""
    none = dict.fromkeys(buckets.sizes, 0.0)
    return CollectiveSeconds(buckets, none, none, none)


class _LayoutCollectives:
    """Collectives of one layout."""

    def __init__(self, wire: LinkModel, layout: ShardedLayout) -> None:
        self._wire = wire
        self._layout = layout
        self._dtype = layout.communication_dtype
        self._padding = layout.collectives.padding

    def gather_s(self, size: UnitSize) -> float:
        """Return the seconds to gather a unit; frozen parameters have buffers of their own."""
        if self._layout.zero_stage == 0:
            return 0.0
        trainable = size.trainable * DTYPE_BYTES[self._dtype]
        seconds = self._seconds("gather", size.trainable, trainable)
        if self._layout.zero_stage == 3:
            seconds += sum(self._seconds("gather", n, n) for n in size.frozen_buffers if n)
        return seconds

    def reduce_s(self, size: UnitSize) -> float:
        """Return the seconds to reduce a unit's gradient, until every owner has the sum over all
        ranks."""
        if self._layout.zero_stage == 0:
            return self._sum_s(size)
        seconds = self._seconds("reduce", size.trainable, size.gradient_bytes)
        return seconds + self.over_hosts_s(size)

    def over_hosts_s(self, size: UnitSize) -> float:
        """Return the seconds to sum a unit's gradient over hosts, if each has all of the state."""
        if self._layout.sharding == "all":
            return 0.0
        return self._wire.seconds("reduce", "native", "across", size.gradient_bytes)

    def meeting_s(self, operation: Operation) -> float:
        """Return the seconds of a collective of next to no bytes."""
        if self._layout.cuts.ranks == 1:
            return 0.0
        return self._seconds(operation, 1, 1)

    def _sum_s(self, size: UnitSize) -> float:
        """Return the seconds of an all-reduce; if not timed, of a reduction and a gather."""
        if size.trainable and self._wire.knows("sum", "native", self._layout.group):
            return self._wire.seconds("sum", "native", self._layout.group, size.gradient_bytes)
        both: tuple[Operation, ...] = ("reduce", "gather")
        return sum(self._seconds(op, size.trainable, size.gradient_bytes) for op in both)

    def needs_receive_buffer(self, size: UnitSize) -> bool:
        """Check if all ranks' parts of the own interval arrive in a separate buffer."""
        divided = self._layout.zero_stage > 0
        return divided and self._form("reduce", size.trainable) == "all_to_all"

    @property
    def copied_rows(self) -> int:
        """Number of own intervals needed by the sum over hosts. Two persist, because the next
        bucket is reduced meanwhile. Where hosts cut unequally, add one sent and one received for
        each other host, and the sum."""
        layout = self._layout
        if layout.sharding == "all" or layout.zero_stage == 0 or layout.hosts == 1:
            return 0
        return 2 if layout.alike else 2 + 2 * (layout.hosts - 1) + 1

    def padding_bytes(self, buckets: Buckets) -> int:
        """Return the bytes of padded collectives throughout training: one reduction, and the three
        concurrent gathers at the beginning of a step."""
        if self._layout.zero_stage == 0:
            return 0
        gathers = {name: self._padded_gather(size) for name, size in buckets.sizes.items()}
        reductions = [self._padded("reduce", s, GRADIENT_BYTES) for s in buckets.sizes.values()]
        ends = gathers.pop(ROOT) + gathers.pop(BEFORE)
        return ends + max(gathers.values(), default=0) + max(reductions, default=0)

    def _padded_gather(self, size: UnitSize) -> int:
        trainable = self._padded("gather", size, DTYPE_BYTES[self._dtype])
        if self._layout.zero_stage < 3:
            return trainable
        frozen = (self._padded("gather", UnitSize(n, 0), 1) for n in size.frozen_buffers)
        return trainable + sum(frozen)

    def _padded(self, operation: Operation, size: UnitSize, width: int) -> int:
        """Return the bytes of all ranks' intervals, padded to the largest possible, and one
        more."""
        ranks = self._layout.cuts.ranks
        if not size.trainable or self._form(operation, size.trainable) != "padded":
            return 0
        return (ranks + 1) * (ceil(size.trainable * self._padding / ranks) + 1) * width

    def _seconds(self, operation: Operation, numel: int, size: int) -> float:
        if not size:
            return 0.0
        form = self._form(operation, numel)
        if form == "padded":
            return self._wire.seconds(operation, "native", self._layout.group, size * self._padding)
        return self._wire.seconds(operation, form, self._layout.group, size)

    def _form(self, operation: Operation, numel: int) -> str:
        """Return the form of one collective over a buffer of `numel` elements."""
        layout = self._layout
        named = layout.collectives.gather if operation == "gather" else layout.collectives.reduce
        equal = layout.cuts.equal(numel)
        if equal and self._wire.knows(operation, "native", layout.group):
            return "native"
        if named == "native" and not equal:
            raise InputError(
                f"the native form of {operation} takes equal intervals only",
                code="native-collective-unequal",
                why="the plan names it for all buffers, and some are cut unequally",
                fix="plan again from a new profile: `gpumix plan JOB.yaml`",
            )
        return named
