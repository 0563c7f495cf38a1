"""How long the collectives of a plan take, and which form each of them has.

`Links` holds, by unit kind and for `ROOT`, the seconds of one gather and of one reduction. Times
are measured over all ranks; a single rank communicates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from gpumix.cost.curves import value_at
from gpumix.spec.errors import InputError
from gpumix.spec.plan import DTYPE_BYTES, Collectives, GatherForm, ReduceForm, cut_sizes
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

    A unit whose intervals are not all equal cannot use the native form and takes the uneven one.

    Raises:
        InputError: the profile has times for an operation, but not for the form that is needed.
    """
    sizes = unit_sizes(profile.model)
    uneven = uneven_collectives(profile)
    gather: dict[str, float] = {}
    reduce: dict[str, float] = {}
    all_to_all: set[str] = set()
    for name, size in sizes.items():
        equal = len(set(cut_sizes(size.trainable, shares))) == 1
        gather_form = _usable_form(collectives.gather, uneven.gather, equal)
        reduce_form = _usable_form(collectives.reduce, uneven.reduce, equal)
        gathered = size.gathered_bytes(profile.compute_dtype)
        alone = len(shares) == 1
        gather[name] = 0.0 if alone else _seconds(profile, "gather", gather_form, gathered)
        reduce[name] = (
            0.0 if alone else _seconds(profile, "reduce", reduce_form, size.gradient_bytes)
        )
        if reduce_form == "all_to_all":
            all_to_all.add(name)
    return Links(gather, reduce, frozenset(all_to_all))


def free_links(model: ModelProfile) -> Links:
    """Collectives that take no time, to tell computing from waiting."""
    none = dict.fromkeys(unit_sizes(model), 0.0)
    return Links(none, none, frozenset())


def uneven_collectives(profile: Profile) -> Collectives:
    """The profile's forms with `native` replaced by the fastest form that takes unequal shares.

    Fastest for the largest unit; where nothing was measured, the default of `Collectives`.
    """
    chosen = profile.collectives
    sizes = unit_sizes(profile.model).values()
    gathered = max(size.gathered_bytes(profile.compute_dtype) for size in sizes)
    reduced = max(size.gradient_bytes for size in sizes)
    if chosen.gather == "native":
        form = _fastest(profile, "gather", gathered, Collectives().gather)
        chosen = chosen.model_copy(update={"gather": cast(GatherForm, form)})
    if chosen.reduce == "native":
        form = _fastest(profile, "reduce", reduced, Collectives().reduce)
        chosen = chosen.model_copy(update={"reduce": cast(ReduceForm, form)})
    return chosen


def _usable_form(wanted: str, uneven: str, equal: bool) -> str:
    return uneven if wanted == "native" and not equal else wanted


def _measured(profile: Profile, operation: Operation) -> list[CollectiveTimes]:
    return [t for t in profile.network if t.operation == operation]


def _fastest(profile: Profile, operation: Operation, size: int, default: str) -> str:
    times = [t for t in _measured(profile, operation) if t.form != "native"]
    best = min(times, key=lambda t: (value_at(t.times, size), t.form), default=None)
    return default if best is None else best.form


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
