"""Buckets of a step: parameters gathered and reduced together, by model profile and plan.

As in `engine.unit.sharded_units`, consecutive units share a bucket, and the root's parameters are
in up to three. A *run* is a row of unit calls that compute with one bucket. A unit bucket is named
by the kinds of its units, so equal buckets are counted once; the root's are `ROOT`, `BEFORE` and
`AFTER`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from gpumix.cost.memory_layout.buffer_slots import (
    ALWAYS,
    BucketLifetimes,
    Buffer,
    align_size,
    compute_bucket_lifetimes,
    compute_root_end_lifetimes,
    share_slots,
)
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan, ZeroStage
from gpumix.schema.plan.stage import DTYPE_BYTES
from gpumix.schema.profile.profile import ROOT, EndParameters, ModelProfile

BEFORE, AFTER = f"{ROOT} before", f"{ROOT} after"
GRADIENT_BYTES = 4  # gradients are filled and reduced in fp32

Names = tuple[str, ...]


@dataclass(frozen=True)
class UnitSize:
    """Size of a bucket or unit: elements with a gradient, bytes of frozen parameters, and how many
    of these bytes are packed: the same in every dtype, in a buffer of their own."""

    trainable: int
    frozen_bytes: int
    packed_bytes: int = 0

    @property
    def frozen_float_bytes(self) -> int:
        """Bytes of the frozen parameters that are not packed."""
        return self.frozen_bytes - self.packed_bytes

    @property
    def frozen_buffers(self) -> tuple[int, int]:
        """Bytes of the buffers of frozen parameters, each gathered by itself."""
        return self.frozen_float_bytes, self.packed_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the full gradient."""
        return self.trainable * GRADIENT_BYTES


@dataclass(frozen=True)
class BucketGrouping:
    """Grouping of parameters into buckets: units per bucket, and separate buckets for root
    parameters used only before the first unit or only after the last."""

    joined: int = 1
    before: bool = False
    after: bool = False

    @classmethod
    def of(cls, model: ModelProfile, plan: Plan) -> BucketGrouping:
        """Return the grouping of a plan.

        Raises:
            InputError: the profile does not know the size of the plan's ends of the root.
        """
        stage, root = plan.stages[0], model.root
        for planned, known in ((stage.before, root.before), (stage.after, root.after)):
            if planned and set(planned) != set(known.names):
                raise InputError(
                    f"the plan has a bucket of its own for '{planned[0]}'",
                    code="bucket-not-in-model",
                    why=f"the profile knows what {', '.join(known.names) or 'no parameter'} takes "
                    "there",
                    fix="give the profile that the plan was made from, or plan again from this one",
                )
        return cls(stage.joined, before=bool(stage.before), after=bool(stage.after))


ONE_UNIT_PER_BUCKET = BucketGrouping()


@dataclass(frozen=True)
class BucketRun:
    """Consecutive unit calls, from number `first` on, by kind; and the number of their bucket."""

    bucket: int
    first: int
    kinds: Names

    @property
    def last(self) -> int:
        return self.first + len(self.kinds) - 1


NO_BUCKET = ""  # no bucket: no collective runs


@dataclass(frozen=True)
class OverlappedRun:
    """Work of one run: the kinds computed, and the buckets gathered and reduced meanwhile."""

    kinds: Names
    gathered: str = NO_BUCKET
    reduced: str = NO_BUCKET


@dataclass(frozen=True)
class Buckets:
    """Buckets of a model.

    Attributes:
        runs: in the order of the forward pass.
        kinds: the name of each unit bucket.
        sizes: by name, including empty buckets of the root.
    """

    runs: tuple[BucketRun, ...]
    kinds: Names
    sizes: Mapping[str, UnitSize]
    joining: BucketGrouping

    def rebuild_for_model(self, model: ModelProfile) -> Buckets:
        """Return the equivalent buckets of a rank's part of the model."""
        return build_buckets(model, self.joining)

    def kind(self, run: int) -> str:
        """Return the bucket name of a run."""
        return self.kinds[self.runs[run].bucket]

    @property
    def names(self) -> Names:
        """Name of every bucket, in the engine's layout order."""
        return (*self.kinds, BEFORE, AFTER, ROOT)

    @cached_property
    def reduced_after(self) -> Mapping[int, int]:
        """Bucket by number of the run completing the bucket's gradient."""
        first: dict[int, int] = {}
        for number, run in enumerate(self.runs):
            first.setdefault(run.bucket, number)
        return {number: bucket for bucket, number in first.items()}

    @cached_property
    def forward(self) -> tuple[OverlappedRun, ...]:
        """Work of each run in the forward pass."""
        ahead = [*(self.kind(k) for k in range(1, len(self.runs))), AFTER]
        return tuple(OverlappedRun(run.kinds, name) for run, name in zip(self.runs, ahead))

    @cached_property
    def backward(self) -> tuple[OverlappedRun, ...]:
        """Work of each run in the backward pass, listed in forward order."""
        done = self.reduced_after
        reduced = [
            self.kinds[done[k]] if k in done else NO_BUCKET for k in range(1, len(self.runs))
        ]
        return tuple(
            OverlappedRun(run.kinds, self.kind(k - 1) if k else NO_BUCKET, name)
            for k, (run, name) in enumerate(zip(self.runs, [*reduced, AFTER]))
        )

    @cached_property
    def forward_counts(self) -> tuple[tuple[OverlappedRun, int], ...]:
        """Distinct runs of the forward pass and their counts."""
        return tuple(Counter(self.forward).items())

    @cached_property
    def backward_counts(self) -> tuple[tuple[OverlappedRun, int], ...]:
        """Distinct runs of the backward pass and their counts."""
        return tuple(Counter(self.backward).items())

    def counts(self) -> Counter[str]:
        """Return the number of buckets of each name."""
        return Counter(self.names)

    def full_bytes(self, compute_dtype: str, zero_stage: ZeroStage, *, widened: int = 1) -> int:
        """Return the bytes allocated throughout training for gathered parameters.

        Args:
            widened: width of frozen parameters in the compute dtype over their stored width.
        """
        sizes = [
            align_size(size.trainable * DTYPE_BYTES[compute_dtype])
            + align_size(size.frozen_float_bytes * widened)
            + align_size(size.packed_bytes)
            for size in map(self.sizes.__getitem__, self.names)
        ]
        if zero_stage < 3:
            return sum(sizes)
        return _compute_slot_bytes(self._places, tuple(sizes), gathered=True)

    def arriving_bytes(self, communication_dtype: str) -> int:
        """Return the bytes, allocated throughout training, where each bucket in turn arrives before
        a cast to the compute dtype."""
        return max(
            align_size(size.trainable * DTYPE_BYTES[communication_dtype])
            + align_size(size.frozen_float_bytes)
            for size in self.sizes.values()
        )

    def gradient_bytes(self, zero_stage: ZeroStage) -> int:
        """Return the bytes allocated throughout training for full gradients."""
        sizes = [align_size(self.sizes[name].gradient_bytes) for name in self.names]
        if zero_stage < 2:
            return sum(sizes)
        return _compute_slot_bytes(self._places, tuple(sizes), gathered=False)

    @property
    def _places(self) -> tuple[int, ...]:
        return tuple(run.bucket for run in self.runs)


@lru_cache(maxsize=256)
def _compute_slot_bytes(places: tuple[int, ...], sizes: tuple[int, ...], *, gathered: bool) -> int:
    """Return the bytes of the slots shared by buffers, in the order: units, root ends, root."""
    uses = [
        *compute_bucket_lifetimes(places, len(sizes) - 3),
        *compute_root_end_lifetimes(places),
        BucketLifetimes(ALWAYS, ALWAYS),
    ]
    times = (use.gathered if gathered else use.gradient for use in uses)
    return share_slots([Buffer(size, of) for size, of in zip(sizes, times)]).total_bytes


def list_unit_sizes(model: ModelProfile) -> dict[str, UnitSize]:
    """Return the size of each unit kind, and of the whole root under `ROOT`."""
    root = model.root
    sizes = {k.name: UnitSize(k.trainable, k.frozen_bytes, k.packed_bytes) for k in model.kinds}
    return sizes | {ROOT: UnitSize(root.trainable, root.frozen_bytes, root.packed_bytes)}


def build_buckets(model: ModelProfile, joining: BucketGrouping) -> Buckets:
    """Return the buckets of a model."""
    root = model.root
    ends = (
        root.before if joining.before else EndParameters(),
        root.after if joining.after else EndParameters(),
    )
    return _buckets(
        model.calls,
        model.kind_of_call,
        joining,
        tuple(list_unit_sizes(model).items()),
        tuple(UnitSize(end.trainable, end.frozen_bytes, end.packed_bytes) for end in ends),
    )


@lru_cache(maxsize=256)  # a search asks for the same few models, thousands of times
def _buckets(
    calls: Names,
    kinds: Names,
    joining: BucketGrouping,
    of_units: tuple[tuple[str, UnitSize], ...],
    ends: tuple[UnitSize, ...],
) -> Buckets:
    runs, members = _group_units(calls, kinds, joining.joined)
    units = dict(of_units)
    sizes = {_name(kinds): _sum([units[kind] for kind in kinds]) for kinds in set(members)}
    both, whole = _sum(ends), units[ROOT]
    sizes[BEFORE], sizes[AFTER] = ends
    sizes[ROOT] = UnitSize(
        whole.trainable - both.trainable,
        whole.frozen_bytes - both.frozen_bytes,
        whole.packed_bytes - both.packed_bytes,
    )
    return Buckets(runs, tuple(map(_name, members)), sizes, joining)


def _sum(sizes: Sequence[UnitSize]) -> UnitSize:
    return UnitSize(
        sum(s.trainable for s in sizes),
        sum(s.frozen_bytes for s in sizes),
        sum(s.packed_bytes for s in sizes),
    )


def _group_units(
    calls: Names, kinds: Names, joined: int
) -> tuple[tuple[BucketRun, ...], tuple[Names, ...]]:
    """Return the runs, and the kinds of the units of each bucket."""
    kind_of = dict(zip(calls, kinds))  # in the order of their first calls
    names = tuple(kind_of)
    rows = [names[k : k + joined] for k in range(0, len(names), joined)]
    number = {name: n for n, row in enumerate(rows) for name in row}
    runs, first = [], 0
    for bucket, group in groupby(number[name] for name in calls):
        length = len(list(group))
        runs.append(BucketRun(bucket, first, kinds[first : first + length]))
        first += length
    return tuple(runs), tuple(tuple(kind_of[name] for name in row) for row in rows)


def _name(kinds: Names) -> str:
    """Return the name of a bucket with units of these kinds."""
    alike = ((kind, len(list(group))) for kind, group in groupby(kinds))
    return " + ".join(kind if count == 1 else f"{count} {kind}" for kind, count in alike)
