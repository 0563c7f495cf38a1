"""What a step gathers and reduces as one, from the model's profile and what a plan says of it.

As in `engine.parts`: units in a row lie in one bucket, and the root's parameters in up to three. A
*run* is a row of unit calls that compute with one bucket. Buckets are named by the kinds of their
units, so that those that are alike are counted once; the root's are `ROOT`, `BEFORE` and `AFTER`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from gpumix.cost.slots import (
    ALWAYS,
    BucketUses,
    Buffer,
    aligned,
    bucket_uses,
    end_uses,
    share_slots,
)
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan, ZeroStage
from gpumix.spec.profile import ROOT, End, ModelProfile
from gpumix.spec.stage import DTYPE_BYTES

BEFORE, AFTER = f"{ROOT} before", f"{ROOT} after"
GRADIENT_BYTES = 4  # gradients are filled and reduced in fp32

Names = tuple[str, ...]


@dataclass(frozen=True)
class UnitSize:
    """What a bucket, or one unit of a kind, holds: elements with a gradient, and bytes without."""

    trainable: int
    frozen_bytes: int

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole gradient."""
        return self.trainable * GRADIENT_BYTES


@dataclass(frozen=True)
class Joining:
    """How a plan puts parameters into buckets: so many units in a row, and whether what the root
    uses only before the first unit, and only after the last, has buckets of its own."""

    joined: int = 1
    before: bool = False
    after: bool = False

    @classmethod
    def of(cls, model: ModelProfile, plan: Plan) -> Joining:
        """Of a plan.

        Raises:
            InputError: the profile does not know how large the plan's ends of the root are.
        """
        stage, root = plan.stages[0], model.root
        for planned, known in ((stage.before, root.before), (stage.after, root.after)):
            if planned and set(planned) != set(known.names):
                raise InputError(
                    f"the plan has a bucket of its own for '{planned[0]}'",
                    why=f"the profile knows what {', '.join(known.names) or 'no parameter'} takes "
                    "there",
                    fix="give the profile that the plan was made from, or plan again from this one",
                )
        return cls(stage.joined, before=bool(stage.before), after=bool(stage.after))


SINGLE = Joining()


@dataclass(frozen=True)
class Run:
    """Unit calls in a row, from number `first` on, by kind; and the number of their bucket."""

    bucket: int
    first: int
    kinds: Names

    @property
    def last(self) -> int:
        return self.first + len(self.kinds) - 1


NOTHING = ""  # in the place of a bucket: no collective runs


@dataclass(frozen=True)
class Beside:
    """What happens at one run: the kinds that are computed, and the buckets that are gathered and
    reduced meanwhile."""

    kinds: Names
    gathered: str = NOTHING
    reduced: str = NOTHING


@dataclass(frozen=True)
class Buckets:
    """The buckets of a model.

    Attributes:
        runs: in the order of the forward pass.
        kinds: the name of each of the units' buckets.
        sizes: by name; the root's among them, also where nothing is in them.
    """

    runs: tuple[Run, ...]
    kinds: Names
    sizes: Mapping[str, UnitSize]
    joining: Joining

    def of_part(self, model: ModelProfile) -> Buckets:
        """The same buckets, of what a rank has of the model."""
        return buckets_of(model, self.joining)

    def kind(self, run: int) -> str:
        """The name of the bucket of a run."""
        return self.kinds[self.runs[run].bucket]

    @property
    def names(self) -> Names:
        """Of every bucket, in the order in which the engine lays them out."""
        return (*self.kinds, BEFORE, AFTER, ROOT)

    @cached_property
    def reduced_after(self) -> Mapping[int, int]:
        """By number of the run after whose backward it is: the bucket whose gradient is done."""
        first: dict[int, int] = {}
        for number, run in enumerate(self.runs):
            first.setdefault(run.bucket, number)
        return {number: bucket for bucket, number in first.items()}

    @cached_property
    def forward(self) -> tuple[Beside, ...]:
        """Of each run in the forward pass."""
        ahead = [*(self.kind(k) for k in range(1, len(self.runs))), AFTER]
        return tuple(Beside(run.kinds, name) for run, name in zip(self.runs, ahead))

    @cached_property
    def backward(self) -> tuple[Beside, ...]:
        """The same of the backward pass, in the order of the forward pass."""
        done = self.reduced_after
        reduced = [self.kinds[done[k]] if k in done else NOTHING for k in range(1, len(self.runs))]
        return tuple(
            Beside(run.kinds, self.kind(k - 1) if k else NOTHING, name)
            for k, (run, name) in enumerate(zip(self.runs, [*reduced, AFTER]))
        )

    @cached_property
    def forward_counts(self) -> tuple[tuple[Beside, int], ...]:
        """How often each of them happens."""
        return tuple(Counter(self.forward).items())

    @cached_property
    def backward_counts(self) -> tuple[tuple[Beside, int], ...]:
        """How often each of them happens."""
        return tuple(Counter(self.backward).items())

    def counts(self) -> Counter[str]:
        """Buckets of each name."""
        return Counter(self.names)

    def full_bytes(self, compute_dtype: str, zero_stage: ZeroStage, *, widened: int = 1) -> int:
        """Memory of all gathered parameters, the whole run. `widened`: by how much frozen ones are
        wider where they are computed with than where they are stored."""
        sizes = [
            aligned(size.trainable * DTYPE_BYTES[compute_dtype])
            + aligned(size.frozen_bytes * widened)
            for size in map(self.sizes.__getitem__, self.names)
        ]
        if zero_stage < 3:
            return sum(sizes)
        return _shared(self._places, tuple(sizes), gathered=True)

    def arriving_bytes(self, communication_dtype: str) -> int:
        """Memory in which one bucket after the other arrives in another dtype than it is computed
        with, the whole run."""
        return max(
            aligned(size.trainable * DTYPE_BYTES[communication_dtype]) + aligned(size.frozen_bytes)
            for size in self.sizes.values()
        )

    def gradient_bytes(self, zero_stage: ZeroStage) -> int:
        """Memory of all whole gradients, the whole run."""
        sizes = [aligned(self.sizes[name].gradient_bytes) for name in self.names]
        if zero_stage < 2:
            return sum(sizes)
        return _shared(self._places, tuple(sizes), gathered=False)

    @property
    def _places(self) -> tuple[int, ...]:
        return tuple(run.bucket for run in self.runs)


@lru_cache(maxsize=256)
def _shared(places: tuple[int, ...], sizes: tuple[int, ...], *, gathered: bool) -> int:
    """Bytes of the slots that buffers share, the root's ends and the root behind those of units."""
    uses = [
        *bucket_uses(places, len(sizes) - 3),
        *end_uses(places),
        BucketUses(ALWAYS, ALWAYS),
    ]
    times = (use.gathered if gathered else use.gradient for use in uses)
    return share_slots([Buffer(size, of) for size, of in zip(sizes, times)]).total_bytes


def unit_sizes(model: ModelProfile) -> dict[str, UnitSize]:
    """The size of each unit kind, and of the whole root under `ROOT`."""
    sizes = {k.name: UnitSize(k.trainable, k.frozen_bytes) for k in model.kinds}
    return sizes | {ROOT: UnitSize(model.root.trainable, model.root.frozen_bytes)}


def buckets_of(model: ModelProfile, joining: Joining) -> Buckets:
    """The buckets of a model."""
    root = model.root
    ends = (root.before if joining.before else End(), root.after if joining.after else End())
    return _buckets(
        model.calls,
        model.kind_of_call,
        joining,
        tuple(unit_sizes(model).items()),
        tuple(UnitSize(end.trainable, end.frozen_bytes) for end in ends),
    )


@lru_cache(maxsize=256)  # a search asks for the same few models, thousands of times
def _buckets(
    calls: Names,
    kinds: Names,
    joining: Joining,
    of_units: tuple[tuple[str, UnitSize], ...],
    ends: tuple[UnitSize, ...],
) -> Buckets:
    runs, members = _laid_out(calls, kinds, joining.joined)
    units = dict(of_units)
    sizes = {_name(kinds): _sum([units[kind] for kind in kinds]) for kinds in set(members)}
    both, whole = _sum(ends), units[ROOT]
    sizes[BEFORE], sizes[AFTER] = ends
    sizes[ROOT] = UnitSize(whole.trainable - both.trainable, whole.frozen_bytes - both.frozen_bytes)
    return Buckets(runs, tuple(map(_name, members)), sizes, joining)


def _sum(sizes: Sequence[UnitSize]) -> UnitSize:
    return UnitSize(sum(s.trainable for s in sizes), sum(s.frozen_bytes for s in sizes))


def _laid_out(calls: Names, kinds: Names, joined: int) -> tuple[tuple[Run, ...], tuple[Names, ...]]:
    """The runs, and the kinds of the units of each bucket."""
    kind_of = dict(zip(calls, kinds))  # in the order of their first calls
    names = tuple(kind_of)
    rows = [names[k : k + joined] for k in range(0, len(names), joined)]
    number = {name: n for n, row in enumerate(rows) for name in row}
    runs, first = [], 0
    for bucket, group in groupby(number[name] for name in calls):
        length = len(list(group))
        runs.append(Run(bucket, first, kinds[first : first + length]))
        first += length
    return tuple(runs), tuple(tuple(kind_of[name] for name in row) for row in rows)


def _name(kinds: Names) -> str:
    """The name of a bucket of units of these kinds."""
    alike = ((kind, len(list(group))) for kind, group in groupby(kinds))
    return " + ".join(kind if count == 1 else f"{count} {kind}" for kind, count in alike)
