"""Sharded models: units, and buckets of parameters.

The memory of each bucket is decided here, once. At ZeRO stage 3, buckets that are never gathered
simultaneously share a slot in turn, and so do gradient buffers at stages 2 and 3
(`cost.memory_layout.buffer_slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch

from gpumix.cost.memory_layout.buffer_slots import (
    ALWAYS,
    BucketLifetimes,
    Buffer,
    align_size,
    compute_bucket_lifetimes,
    compute_root_end_lifetimes,
    share_slots,
)
from gpumix.engine.comm.step_recorder import CurrentRecorder
from gpumix.engine.loss.chunked_cross_entropy import ChunkedCrossEntropy
from gpumix.engine.sharding.bucket import Bucket, GatherBuffer
from gpumix.engine.sharding.flat_group import (
    Dtypes,
    FlatGroup,
    FlatGroupSpec,
    reserve_reduction_memory,
)
from gpumix.engine.sharding.shard import Source
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.engine.sharding.unit_discovery import ModelUnits, ParameterSlot, Unit
from gpumix.schema.plan.stage import Stage
from gpumix.schema.profile.profile import ROOT

ALWAYS_IN_USE = BucketLifetimes(gathered=ALWAYS, gradient=ALWAYS)  # throughout


class ShardedUnit:
    """A unit to compute, with the module's own `forward` and parameters in `bucket`."""

    def __init__(self, unit: Unit, bucket: Bucket) -> None:
        self.name = unit.name
        self.kind = unit.kind
        self.module = unit.module
        self.forward: Callable[..., object] = unit.module.forward
        self.positions = unit.positions
        self.bucket = bucket
        self.with_buffers = [module for module in unit.module.modules() if module._buffers]
        # Also if the unit's parameters are the root's, because other units share them.
        self.trainable = any(p.requires_grad for p in unit.module.parameters())

    def taken(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the unit's arguments: with hidden states of this rank's positions only, with
        sequence parallelism."""
        if self.positions is None:
            return args, kwargs
        return self.positions.divided(self.name, args, kwargs)


@dataclass(frozen=True)
class ShardedUnits:
    """A sharded model.

    The root unit's parameters are in separate buckets: parameters used only `before` the first
    unit, parameters used only `after` the last unit, and parameters in use throughout: `root` in
    this stage only, `shared` with other stages, among which they are sharded.
    """

    layout: ShardLayout
    units: dict[str, ShardedUnit]
    calls: tuple[str, ...]
    before: Bucket
    root: Bucket
    after: Bucket
    of_units: tuple[Bucket, ...]
    shared: tuple[Bucket, ...] = ()
    head: ChunkedCrossEntropy | None = None  # None: full logits

    @cached_property
    def always_used_buckets(self) -> tuple[Bucket, ...]:
        return (self.root, *self.shared)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets: the root's, and the units'."""
        return (*self.always_used_buckets, self.before, self.after, *self.of_units)

    @cached_property
    def recorder(self) -> CurrentRecorder:
        """Recorder of executed work."""
        return self.layout.comm.recorder

    @cached_property
    def last_call(self) -> int:
        return len(self.calls) - 1

    @cached_property
    def sequence(self) -> tuple[ShardedUnit, ...]:
        """The unit of each call."""
        return tuple(self.units[name] for name in self.calls)

    @cached_property
    def ahead(self) -> tuple[Bucket, ...]:
        """Next bucket needed by the forward pass after each call's own; `after` at the end."""
        found, ahead = [self.after], self.after
        for unit, following in reversed([*pairwise(self.sequence)]):
            if unit.bucket is not following.bucket:
                ahead = following.bucket
            found.append(ahead)
        return tuple(reversed(found))

    @cached_property
    def behind(self) -> tuple[Bucket | None, ...]:
        """Next bucket needed by the backward pass after each call's own; None at the end."""
        found: list[Bucket | None] = [None]
        for unit, following in pairwise(self.sequence):
            alike = unit.bucket is following.bucket
            found.append(found[-1] if alike else unit.bucket)
        return tuple(found)

    @cached_property
    def reduced_after(self) -> dict[int, Bucket]:
        """Bucket finished by the backward of a call: at the first of its calls."""
        first = {id(u.bucket): number for number, u in reversed([*enumerate(self.sequence)])}
        return {number: self.sequence[number].bucket for number in first.values()}

    def rest(self) -> None:
        """Release the buckets kept for backward, after a forward pass without backward next."""
        for bucket in (self.sequence[-1].bucket, self.after):
            bucket.arrived()
            bucket.release()


@dataclass(frozen=True)
class Storage:
    """Storage of a rank's parameters.

    Attributes:
        source: provides the initial values.
        head: chunked cross-entropy; None: full logits.
    """

    device: torch.device
    dtypes: Dtypes
    source: Source
    head: ChunkedCrossEntropy | None = None


def shard(
    anatomy: ModelUnits,
    stage: Stage,
    layout: ShardLayout,
    storage: Storage,
    *,
    shared: Sequence[Bucket] = (),
) -> ShardedUnits:
    """Replace the parameters of a model by views of flat buffers sharded by `layout`.

    Args:
        anatomy: the stage's part of the model.
        stage: order of the calls, number of consecutive units per bucket, and root parameters used
            at one end only.
        shared: root parameters shared with other stages, in use throughout.
    """
    own = {unit.name: list(unit.slots) for unit in anatomy.units}
    names = tuple(dict.fromkeys(stage.units))
    rows = [names[k : k + stage.joined] for k in range(0, len(names), stage.joined)]
    number = {name: n for n, row in enumerate(rows) for name in row}
    sequence = [n for n, _ in groupby(number[name] for name in stage.units)]
    others = {slot.name: slot for slot in anatomy.root.slots}
    before = [others.pop(name) for name in stage.before]
    after = [others.pop(name) for name in stage.after]

    def request(name: str, slots: list[ParameterSlot], *uses: BucketLifetimes) -> _Request:
        return _Request(name, FlatGroupSpec.among(slots, storage.dtypes, layout), *uses)

    of_units, ends = (
        compute_bucket_lifetimes(sequence, len(rows)),
        compute_root_end_lifetimes(sequence),
    )
    requests = [
        request(row[0], [slot for name in row for slot in own[name]], uses)
        for row, uses in zip(rows, of_units)
    ]
    requests += [
        request(f"{ROOT} before", before, ends[0]),
        request(f"{ROOT} after", after, ends[1]),
        request(ROOT, list(others.values())),
    ]
    *buckets, first, last, root = _allocate_buckets(requests, layout, storage)
    _expect_reductions((*buckets, first, last, root), storage.head)
    units = {u.name: ShardedUnit(u, buckets[number[u.name]]) for u in anatomy.units}
    return ShardedUnits(
        layout,
        units,
        stage.units,
        before=first,
        root=root,
        after=last,
        of_units=tuple(buckets),
        shared=tuple(shared),
        head=storage.head,
    )


def make_shared_bucket(
    slots: Sequence[ParameterSlot], layout: ShardLayout, storage: Storage
) -> Bucket:
    """Make the bucket of root parameters shared by several stages; see `shard`."""
    request = _Request(ROOT, FlatGroupSpec.among(list(slots), storage.dtypes, layout))
    (bucket,) = _allocate_buckets([request], layout, storage)
    _expect_reductions([bucket], storage.head)
    return bucket


def _expect_reductions(buckets: Iterable[Bucket], head: ChunkedCrossEntropy | None) -> None:
    """Allocate reduction memory, shared by buckets in turn."""
    trained = [group for bucket in buckets for group in bucket.trainable]
    reserve_reduction_memory(trained)
    if head is not None:
        head.add_to_gradients_of(trained)


def make_standalone_unit(unit: Unit, layout: ShardLayout, storage: Storage) -> ShardedUnit:
    """Make a unit in separate memory; see `shard`."""
    request = _Request(unit.name, FlatGroupSpec.among(list(unit.slots), storage.dtypes, layout))
    return ShardedUnit(unit, *_allocate_buckets([request], layout, storage))


@dataclass(frozen=True)
class _Request:
    """A bucket to be placed in memory."""

    name: str
    alike: list[FlatGroupSpec]
    uses: BucketLifetimes = ALWAYS_IN_USE

    def full(self, *, shared: bool) -> Buffer:
        sizes = [alike.full_bytes for alike in self.alike]
        return Buffer(sum(map(align_size, sizes)), self.uses.gathered if shared else ALWAYS)

    def gradient(self, layout: ShardLayout) -> Buffer:
        shared = not layout.whole_gradients
        sizes = [alike.gradient_bytes for alike in self.alike]
        return Buffer(sum(map(align_size, sizes)), self.uses.gradient if shared else ALWAYS)

    @property
    def arriving(self) -> list[int]:
        """Bytes of each group."""
        return [align_size(alike.arriving_bytes) for alike in self.alike]

    def bucket(
        self,
        layout: ShardLayout,
        full: torch.Tensor,
        gradient: torch.Tensor,
        arrivals: GatherBuffer | None,
        source: Source,
    ) -> Bucket:
        """Make the bucket in the given memory, in bytes."""
        groups = []
        arriving = arrivals.cut(self.arriving) if arrivals else [None] * len(self.alike)
        for alike, memory in zip(self.alike, arriving):
            groups.append(
                FlatGroup(
                    self.name,
                    alike,
                    full=full[: alike.full_bytes].view(alike.dtype),
                    gradient=gradient[: alike.gradient_bytes].view(torch.float32),
                    arriving=_arriving(alike, memory),
                    source=source,
                )
            )
            full = full[align_size(alike.full_bytes) :]
            gradient = gradient[align_size(alike.gradient_bytes) :]
        return Bucket(self.name, groups, layout, arrivals)


def _arriving(alike: FlatGroupSpec, memory: torch.Tensor | None) -> torch.Tensor | None:
    if memory is None or not alike.arriving_bytes:
        return None
    return memory[: alike.arriving_bytes].view(alike.gathered_dtype)


def _allocate_buckets(
    requests: Sequence[_Request], layout: ShardLayout, storage: Storage
) -> Iterator[Bucket]:
    device = storage.device
    full = _SlotMemory([r.full(shared=not layout.whole_parameters) for r in requests], device)
    gradients = _SlotMemory([r.gradient(layout) for r in requests], device)
    sizes = [request.arriving for request in requests]
    arrivals = GatherBuffer(sizes, device) if any(map(sum, sizes)) else None
    for number, one in enumerate(requests):
        yield one.bucket(layout, full.of(number), gradients.of(number), arrivals, storage.source)


class _SlotMemory:
    """Slots for buffers. Memory of a slot is allocated on first use."""

    def __init__(self, buffers: Sequence[Buffer], device: torch.device) -> None:
        self._slots = share_slots(buffers)
        self._device = device
        self._held: dict[int, torch.Tensor] = {}

    def of(self, number: int) -> torch.Tensor:
        slot = self._slots.of_buffer[number]
        if slot not in self._held:
            size = self._slots.bytes[slot]
            self._held[slot] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._held[slot]
