"""How long the collectives of a plan take, and which form each of them has.

`Links` holds, by unit kind and for `ROOT`, the seconds of one gather and of one reduction. Times
are measured over all ranks; a single rank communicates nothing. As in `engine.comm`, a buffer whose
intervals are equal goes by the backend's native collective, where that was measured; all others go
by the form that the plan names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpumix.cost.curves import value_at
from gpumix.spec.errors import InputError
from gpumix.spec.plan import DTYPE_BYTES, Collectives, cut_sizes
from gpumix.spec.profile import ROOT, CollectiveTimes, ModelProfile, Profile

Operation = Literal["gather", "reduce"]
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
class Links:
    """Seconds of each collective by unit kind (and `ROOT`), and who needs a receive buffer."""

    gather_s: Mapping[str, float]
    reduce_s: Mapping[str, float]
    all_to_all: frozenset[str]


def unit_sizes(model: ModelProfile) -> dict[str, UnitSize]:
    """The size of each unit kind, and of the root under `ROOT`."""
    sizes = {k.name: UnitSize(k.trainable, k.frozen_bytes) for k in model.kinds}
    return sizes | {ROOT: UnitSize(model.root.trainable, model.root.frozen_bytes)}


def links_for(profile: Profile, collectives: Collectives, shares: tuple[float, ...]) -> Links:
    """The collectives of a plan with these forms and state shares, one share per rank.

    Raises:
        InputError: the profile has times for an operation, but not for the form that is needed.
    """
    if len(shares) == 1:
        return free_links(profile.model)
    gather: dict[str, float] = {}
    reduce: dict[str, float] = {}
    all_to_all: set[str] = set()
    for name, size in unit_sizes(profile.model).items():
        trainable = _equal(size.trainable, shares)
        dtype_bytes = DTYPE_BYTES[profile.compute_dtype]
        form = _form(profile, "gather", collectives.gather, equal=trainable)
        gather[name] = _seconds(profile, "gather", form, size.trainable * dtype_bytes)
        # Parameters without gradient lie in a buffer of their own.
        frozen = _equal(size.frozen_bytes, shares)
        form = _form(profile, "gather", collectives.gather, equal=frozen)
        gather[name] += _seconds(profile, "gather", form, size.frozen_bytes)
        form = _form(profile, "reduce", collectives.reduce, equal=trainable)
        reduce[name] = _seconds(profile, "reduce", form, size.gradient_bytes)
        if form == "all_to_all":
            all_to_all.add(name)
    return Links(gather, reduce, frozenset(all_to_all))


def free_links(model: ModelProfile) -> Links:
    """Collectives that take neither time nor memory: those of one rank, and of no network."""
    none = dict.fromkeys(unit_sizes(model), 0.0)
    return Links(none, none, frozenset())


def native_pays(profile: Profile) -> bool:
    """Whether equal intervals have a collective of their own here."""
    return any(times.form == "native" for times in profile.network)


def _equal(numel: int, shares: tuple[float, ...]) -> bool:
    return len(set(cut_sizes(numel, shares))) == 1


def _form(profile: Profile, operation: Operation, named: str, *, equal: bool) -> str:
    """The form of one collective; `named` is the plan's."""
    if equal and any(t.form == "native" for t in _measured(profile, operation)):
        return "native"
    if named == "native" and not equal:
        raise InputError(
            f"the native form of {operation} takes equal intervals only",
            why="the plan names it for all buffers, and some are cut unequally",
            fix="plan again from a new profile: `gpumix plan JOB.yaml`",
        )
    return named


def _measured(profile: Profile, operation: Operation) -> list[CollectiveTimes]:
    return [t for t in profile.network if t.operation == operation]


def _seconds(profile: Profile, operation: Operation, form: str, size: int) -> float:
    """Seconds of one collective of `size` bytes; 0 where the operation was not measured at all."""
    measured = _measured(profile, operation)
    if not measured:
        return 0.0
    for times in measured:
        if times.form == form:
            return value_at(times.times, size)
    raise InputError(
        f"the profile has no times for the '{form}' form of {operation}",
        why=f"it holds {', '.join(sorted(t.form for t in measured))}, but this plan needs '{form}'",
        fix="profile again on this cluster: `gpumix profile JOB.yaml`",
    )
