"""How long the collectives of a plan take, and which form each of them has.

`Links` holds, by unit kind and for `ROOT`, the seconds of each gather and reduction. They come from
a `Wire`: measured over the ranks that ran, or worked out from stated links. As in `engine.comm`, a
buffer whose intervals are equal goes by the backend's native collective, where there is one; all
others go by the form that the plan names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from gpumix.cost.wire import Operation, Wire
from gpumix.spec.errors import InputError
from gpumix.spec.plan import DTYPE_BYTES, Collectives, Sharding, ZeroStage, cut_sizes
from gpumix.spec.profile import ROOT, ModelProfile, Profile, RankGroup

GRADIENT_BYTES = 4  # gradients are filled and reduced in fp32


@dataclass(frozen=True)
class UnitSize:
    """What one unit of a kind puts on the wire: elements with a gradient, and bytes without."""

    trainable: int
    frozen_bytes: int

    def gathered_bytes(self, compute_dtype: str) -> int:
        """Bytes of the unit's gathered parameters."""
        return self.trainable * DTYPE_BYTES[compute_dtype] + self.frozen_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unit's whole gradient."""
        return self.trainable * GRADIENT_BYTES


@dataclass(frozen=True)
class Cuts:
    """How buffers are cut into intervals, one for each of `ranks`: all at `shares`, or equally if
    they divide by the ranks (`even`), or never equally."""

    ranks: int
    even: bool = False
    shares: tuple[float, ...] = ()

    @classmethod
    def alike(cls, ranks: int) -> Self:
        """All ranks have the same share."""
        return cls(ranks, even=True)

    @classmethod
    def unlike(cls, ranks: int) -> Self:
        """The ranks have shares that differ by much."""
        return cls(ranks, even=ranks == 1)

    @classmethod
    def at(cls, shares: tuple[float, ...]) -> Self:
        """Each rank has its share."""
        return cls(len(shares), even=max(shares) == min(shares), shares=shares)

    def equal(self, numel: int) -> bool:
        """Whether a buffer of `numel` elements is cut into equal intervals."""
        if self.even:
            return numel % self.ranks == 0
        # Rounding moves each end of an interval by half an element at most.
        if not self.shares or (max(self.shares) - min(self.shares)) * numel > 2:
            return False
        return len(set(cut_sizes(numel, self.shares))) == 1


@dataclass(frozen=True)
class Layout:
    """How the state is divided: the ZeRO stage, among whom, by which collectives, into which cuts.

    Where each host divides the whole state, the cuts are those of one host.
    """

    zero_stage: ZeroStage
    sharding: Sharding
    collectives: Collectives
    cuts: Cuts

    @property
    def group(self) -> RankGroup:
        """Between whom parameters are gathered."""
        return "inside" if self.sharding == "host" else "all"


@dataclass(frozen=True)
class Links:
    """Seconds of each collective by unit kind (and `ROOT`), and who needs a receive buffer.

    `gather_s` is of the forward pass, `regather_s` of the backward pass, `reduce_s` of all that
    happens to a gradient. `contention` is what a collective and computing cost each other.
    `padding_bytes` is what padded collectives fill beside the units' own buffers.
    """

    gather_s: Mapping[str, float]
    regather_s: Mapping[str, float]
    reduce_s: Mapping[str, float]
    all_to_all: frozenset[str]
    contention: float = 0.0
    padding_bytes: int = 0

    @property
    def take_no_time(self) -> bool:
        """Whether nobody ever waits for a collective."""
        every = (self.gather_s, self.regather_s, self.reduce_s)
        return not any(any(seconds.values()) for seconds in every)


def unit_sizes(model: ModelProfile) -> dict[str, UnitSize]:
    """The size of each unit kind, and of the root under `ROOT`."""
    sizes = {k.name: UnitSize(k.trainable, k.frozen_bytes) for k in model.kinds}
    return sizes | {ROOT: UnitSize(model.root.trainable, model.root.frozen_bytes)}


def links_for(profile: Profile, wire: Wire, layout: Layout) -> Links:
    """The collectives of a plan whose state is divided by `layout`.

    Raises:
        InputError: nothing is known of a form that is needed.
    """
    moves = _Moves(profile, wire, layout)
    sizes = unit_sizes(profile.model)
    gather = {name: moves.gather_s(size) for name, size in sizes.items()}
    none = dict.fromkeys(sizes, 0.0)
    if layout.cuts.ranks == 1 and layout.sharding == "all":
        return free_links(profile.model)
    return Links(
        gather_s=none if layout.zero_stage == 0 else gather,
        regather_s=gather if layout.zero_stage == 3 else none,
        reduce_s={name: moves.reduce_s(size) for name, size in sizes.items()},
        all_to_all=frozenset(n for n, s in sizes.items() if moves.needs_receive_buffer(s)),
        contention=profile.contention,
        padding_bytes=moves.padding_bytes(sizes),
    )


def free_links(model: ModelProfile) -> Links:
    """Collectives that take neither time nor memory: those of one rank, and of no network."""
    none = dict.fromkeys(unit_sizes(model), 0.0)
    return Links(none, none, none, frozenset())


class _Moves:
    """The collectives of one layout."""

    def __init__(self, profile: Profile, wire: Wire, layout: Layout) -> None:
        self._wire = wire
        self._layout = layout
        self._dtype = profile.compute_dtype
        self._padding = layout.collectives.padding

    def gather_s(self, size: UnitSize) -> float:
        """Of a unit's parameters; those without gradient lie in a buffer of their own."""
        if self._layout.zero_stage == 0:
            return 0.0
        trainable = size.trainable * DTYPE_BYTES[self._dtype]
        seconds = self._seconds("gather", size.trainable, trainable)
        if self._layout.zero_stage == 3:
            seconds += self._seconds("gather", size.frozen_bytes, size.frozen_bytes)
        return seconds

    def reduce_s(self, size: UnitSize) -> float:
        """Of a unit's gradient, until every owner has the sum over all ranks."""
        if self._layout.zero_stage == 0:  # to all ranks: to owners, and back
            both: tuple[Operation, ...] = ("reduce", "gather")
            return sum(self._seconds(op, size.trainable, size.gradient_bytes) for op in both)
        seconds = self._seconds("reduce", size.trainable, size.gradient_bytes)
        if self._layout.sharding == "host":
            seconds += self._wire.seconds("reduce", "native", "across", size.gradient_bytes)
        return seconds

    def needs_receive_buffer(self, size: UnitSize) -> bool:
        """Whether all ranks' parts of the own interval arrive in a buffer of their own."""
        return self._form("reduce", size.trainable) == "all_to_all"

    def padding_bytes(self, sizes: Mapping[str, UnitSize]) -> int:
        """The buffers that padded collectives fill beside the units': one gather and one reduction
        are in flight at a time."""
        gathers = [
            s.gathered_bytes(self._dtype)
            for s in sizes.values()
            if self._form("gather", s.trainable) == "padded"
        ]
        reductions = [
            s.gradient_bytes
            for s in sizes.values()
            if self._form("reduce", s.trainable) == "padded"
        ]
        return int(self._padding * (max(gathers, default=0) + max(reductions, default=0)))

    def _seconds(self, operation: Operation, numel: int, size: int) -> float:
        if not size:
            return 0.0
        form = self._form(operation, numel)
        if form == "padded":
            return self._wire.seconds(operation, "native", self._layout.group, size * self._padding)
        return self._wire.seconds(operation, form, self._layout.group, size)

    def _form(self, operation: Operation, numel: int) -> str:
        """The form of one collective over a buffer of `numel` elements."""
        layout = self._layout
        named = layout.collectives.gather if operation == "gather" else layout.collectives.reduce
        equal = layout.cuts.equal(numel)
        if equal and self._wire.knows(operation, "native", layout.group):
            return "native"
        if named == "native" and not equal:
            raise InputError(
                f"the native form of {operation} takes equal intervals only",
                why="the plan names it for all buffers, and some are cut unequally",
                fix="plan again from a new profile: `gpumix plan JOB.yaml`",
            )
        return named
