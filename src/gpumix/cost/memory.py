"""How many bytes a worker holds at its peak, by cause. All amounts are bytes.

The peak is the largest of the moments in `cost.phases`. Each is linear in the worker's share of the
state (its state, and the buffer that receives gradients), so a choice of samples and micro-batch
leaves room for a largest share: `MemoryModel.capacity`, which the planner searches with.
`cost.predict` counts a finished plan exactly, by the intervals that `spec.plan.cut` gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from gpumix.cost.curves import FloatArray, MicroBatches, bytes_at
from gpumix.cost.network import GRADIENT_BYTES, Links, UnitSize, unit_sizes
from gpumix.cost.phases import Phase, phases
from gpumix.spec.cluster import DeviceClass
from gpumix.spec.curve import Curve
from gpumix.spec.plan import DTYPE_BYTES, Mode, ZeroStage, cut_sizes
from gpumix.spec.profile import ROOT, ModelProfile, Profile, UnitKind

# An owned element: its fp32 parameter and its fp32 gradient, the optimizer's state apart.
MASTER_BYTES = 4
SHARD_GRADIENT_BYTES = 4

# What an allocator cannot hand out. CUDA's caching allocator loses memory to fragments between
# blocks of unlike size; layered passes reuse equal blocks, so 6 % is left for that. Allocation on
# the CPU is capped to the byte; 2 % covers the temporaries of the framework's own kernels.
CUDA_RESERVE = 0.06
CPU_RESERVE = 0.02

# A cut rounds both ends of an interval: at most one element a unit, one more for the float sums.
ROUNDING_ELEMENTS = 2


@dataclass(frozen=True)
class Owned:
    """What one rank stores: elements of one unit of each kind, and all its frozen bytes."""

    elements: tuple[tuple[str, int], ...]  # by kind
    frozen_bytes: int


def usable_bytes(device_class: DeviceClass) -> int:
    """What a plan may fill of a device's memory, the framework's own bytes included."""
    reserve = CUDA_RESERVE if device_class.accelerator == "cuda" else CPU_RESERVE
    return int(device_class.memory_bytes * (1.0 - reserve))


def unit_counts(model: ModelProfile) -> Counter[str]:
    """Units of each kind, the root among them; a unit that is called twice is one unit."""
    return Counter({ROOT: 1}) + Counter(dict(zip(model.calls, model.kind_of_call)).values())


def owned_by_rank(model: ModelProfile, shares: tuple[float, ...]) -> tuple[Owned, ...]:
    """What each rank stores at these shares, to the element."""
    counts, sizes = unit_counts(model), unit_sizes(model)
    trainable = {name: cut_sizes(size.trainable, shares) for name, size in sizes.items()}
    frozen = {name: cut_sizes(size.frozen_bytes, shares) for name, size in sizes.items()}
    return tuple(
        Owned(
            elements=tuple((name, owned[rank]) for name, owned in trainable.items()),
            frozen_bytes=sum(n * frozen[name][rank] for name, n in counts.items()),
        )
        for rank in range(len(shares))
    )


@dataclass(frozen=True)
class Demands:
    """Bytes by phase (first axis) of many choices: without state, and what a share of it adds.

    `rounding` is set aside for the rounding of a cut, so that every share up to the capacity fits.
    """

    fixed: FloatArray
    rounding: FloatArray
    per_share: FloatArray

    def capacity(self, free_bytes: float) -> FloatArray:
        """The largest share of the state, at most 1, that each choice leaves room for.

        `free_bytes` is what the device has besides the framework. -1 where the choice does not fit
        even without state.
        """
        room = free_bytes - self.fixed
        share = ((room - self.rounding) / self.per_share).min(axis=0)
        return np.where(room.min(axis=0) >= 0, np.clip(share, 0.0, 1.0), -1.0)


@dataclass(frozen=True)
class MemoryModel:
    """What a model holds whose state is divided over `ranks` ranks, for any samples, micro-batch,
    mode and share.

    Each ZeRO stage shards what the one before it replicates: the optimizer's state and the fp32
    parameters beside a narrower copy (1), the gradients (2), the parameters (3). Parameters that
    are computed with in fp32 are their own masters.
    """

    profile: Profile
    links: Links
    ranks: int
    zero_stage: ZeroStage = 3

    @cached_property
    def sizes(self) -> Mapping[str, UnitSize]:
        return unit_sizes(self.profile.model)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        return unit_counts(self.profile.model)

    @cached_property
    def sharded_per_element(self) -> float:
        """Bytes of one element's state that its owner alone keeps; the mean over the model."""
        masters = MASTER_BYTES if self.zero_stage == 3 or self._narrow else 0
        gradient = SHARD_GRADIENT_BYTES if self.zero_stage >= 2 else 0
        return masters + gradient + self.profile.optimizer_bytes_per_element

    @cached_property
    def sharded_bytes(self) -> int:
        """State of the whole model, as far as the shares divide it."""
        if self.zero_stage == 0:
            return 0
        frozen = self._frozen_bytes if self.zero_stage == 3 else 0
        return ceil(self._parameters * self.sharded_per_element) + frozen

    @cached_property
    def replicated_bytes(self) -> int:
        """State that every rank keeps whole."""
        elements = self._parameters
        if self.zero_stage == 3:
            return 0
        held = elements * DTYPE_BYTES[self.profile.compute_dtype] + self._frozen_bytes
        if self.zero_stage <= 1:
            held += elements * SHARD_GRADIENT_BYTES
        if self.zero_stage == 0:
            held += ceil(elements * self.sharded_per_element)
        return held

    @cached_property
    def _parameters(self) -> int:
        return self.profile.model.parameters

    @cached_property
    def _narrow(self) -> bool:
        return self.profile.compute_dtype != "fp32"

    @cached_property
    def _frozen_bytes(self) -> int:
        return sum(n * self.sizes[name].frozen_bytes for name, n in self.counts.items())

    def demands(self, held: Activations) -> Demands:
        """What each choice takes in each phase, to compare with any amount of memory."""
        alike, spare, per_share = self._in_phases
        return Demands(
            fixed=held.column(alike) + held.in_phases,
            rounding=held.column(spare),
            per_share=held.column(per_share),
        )

    @cached_property
    def _in_phases(self) -> tuple[list[float], list[int], list[int]]:
        """By phase: what all choices take, what is set aside for rounding, what a share adds."""
        one_off = dict.fromkeys(self.sizes, ROUNDING_ELEMENTS)
        an_element = ceil(self.sharded_per_element) + 1
        rounding = ROUNDING_ELEMENTS * sum(self.counts.values()) * an_element
        moments = phases(self.profile.model)
        return (
            [float(sum(self._of_any_choice(phase).values())) for phase in moments],
            [rounding + self._received_bytes(phase, one_off) for phase in moments],
            [max(1, self.bytes_per_share(phase)) for phase in moments],
        )

    def _of_any_choice(self, phase: Phase) -> dict[str, FloatArray | float]:
        """Bytes of `phase` by cause that depend neither on samples nor on the share."""
        gathered = phase.gathered if self.zero_stage == 3 else ()
        gradients = phase.gradients if self.zero_stage >= 2 else ()
        return {
            "replicas": self.replicated_bytes,
            "buffers": self.profile.model.root.buffer_bytes,
            "gathered": self.links.padding_bytes
            + sum(self.sizes[n].gathered_bytes(self.profile.compute_dtype) for n in gathered),
            "gradients": sum(self.sizes[n].gradient_bytes for n in gradients),
        }

    def bytes_per_share(self, phase: Phase) -> int:
        """What `phase` holds more at share 1 than at share 0."""
        whole = {name: size.trainable for name, size in self.sizes.items()}
        return self.sharded_bytes + self._received_bytes(phase, whole)

    def ones_are_least(self, largest: int) -> bool:
        """Whether no cut of samples takes less memory than micro-batches of one sample.

        True where keeping m samples at once takes at least m times what one takes, up to `largest`
        and but for the last digits.
        """
        model, sizes = self.profile.model, np.arange(1, largest + 1)
        of_calls = (c for k in model.kinds for c in (k.kept, k.gradient, k.saved) if c is not None)
        together = [bytes_at(curve, sizes) for curve in (model.root.kept, *of_calls)]
        return all(bool((values >= sizes * values[0] * (1 - 1e-12)).all()) for values in together)

    def peaks(self, held: Activations, owned: Sequence[Owned]) -> list[dict[str, int]]:
        """Peak by cause, the framework apart, of each choice, if it stores `owned`."""
        state = np.asarray([self._owned_bytes(o) for o in owned], np.float64)
        elements = [dict(o.elements) for o in owned]
        received = np.asarray(
            [[self._received_bytes(phase, own) for own in elements] for phase in held.phases],
            np.float64,
        )
        alike = [float(sum(self._of_any_choice(phase).values())) for phase in held.phases]
        highest = np.argmax(held.column(alike) + held.in_phases + received, axis=0)
        peaks: list[dict[str, int]] = [{}] * len(owned)
        for number in set(highest.tolist()):
            phase, places = held.phases[number], np.flatnonzero(highest == number)
            causes = {"state": state} | self._of_any_choice(phase) | held.by_cause(phase)
            causes["gradients"] = causes["gradients"] + received[number]
            by_cause = {
                cause: np.broadcast_to(size, state.shape)[places].astype(np.int64).tolist()
                for cause, size in causes.items()
            }
            for k, place in enumerate(places):
                peaks[place] = {cause: sizes[k] for cause, sizes in by_cause.items()}
        return peaks

    def _owned_bytes(self, owned: Owned) -> int:
        if self.zero_stage == 0:
            return 0
        elements = sum(self.counts[name] * n for name, n in owned.elements)
        frozen = owned.frozen_bytes if self.zero_stage == 3 else 0
        return ceil(elements * self.sharded_per_element) + frozen

    def _received_bytes(self, phase: Phase, own: Mapping[str, int]) -> int:
        """The buffers in which all ranks' parts of the own interval arrive, to be summed there;
        `own` is the length of that interval by kind."""
        if self.zero_stage == 0 or not self.links.all_to_all:
            return 0
        arriving = [own[name] for name in phase.reduced if name in self.links.all_to_all]
        return self.ranks * sum(arriving) * GRADIENT_BYTES


class Activations:
    """What samples hold in each phase, each curve summed once. Whole bytes, rounded up.

    In layers all micro-batches wait at every call; one after the other, only one does. Without
    recompute a call leaves its graph behind, and its backward needs so much less for itself. What
    is kept on the host passes through two buffers of one micro-batch each.
    """

    def __init__(self, model: ModelProfile, micro: MicroBatches, mode: Mode) -> None:
        self._model = model
        self._micro = micro
        self._mode = mode
        self._kinds = {name: model.kind(name) for name in sorted(set(model.kind_of_call))}
        together = micro.bytes if mode.order == "layered" else micro.largest_bytes
        left = {name: self._left_behind(kind) for name, kind in self._kinds.items()}
        self._kept = {name: _up(together(curve)) for name, curve in left.items()}
        self._kept[ROOT] = _up(together(model.root.kept))
        self._passing: dict[str, FloatArray] = {}
        if mode.boundary == "host":
            self._passing = {n: _up(2 * micro.largest_bytes(curve)) for n, curve in left.items()}
        self._boundary = {name: _up(together(k.gradient)) for name, k in self._kinds.items()}
        self._working = {(ROOT, "head"): _up(micro.largest_bytes(model.root.head))}
        for name, kind in self._kinds.items():
            self._working[name, "forward"] = _up(micro.largest_bytes(kind.forward))
            self._working[name, "backward"] = _up(self._of_backward(kind))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The moments of a step."""
        return phases(self._model)

    @cached_property
    def in_phases(self) -> FloatArray:
        """Bytes on the device by phase, all causes together; the phases are the first axis."""
        found = np.empty((len(self.phases), *self._micro.size.shape))
        for place, phase in enumerate(self.phases):
            found[place] = sum(self.by_cause(phase).values())
        return found

    @cached_property
    def on_host(self) -> FloatArray:
        """The most that calls leave on the host until their backward."""
        most = np.zeros(self._micro.size.shape)
        if self._mode.boundary == "host":
            for phase in self.phases:
                kept = (count * self._kept[name] for name, count in phase.kept if name != ROOT)
                most = np.maximum(most, sum(kept))
        return most

    def column(self, by_phase: Sequence[float]) -> FloatArray:
        """One number a phase, to go with `in_phases`."""
        return np.asarray(by_phase, np.float64).reshape(-1, *(1,) * self._micro.size.ndim)

    def by_cause(self, phase: Phase) -> dict[str, FloatArray | float]:
        """Bytes on the device in `phase`: what calls leave until their backward, gradients between
        two calls of all micro-batches that are under way, and what the one that is computed needs.
        """
        boundary, working = phase.boundary, phase.working
        return {
            "activations": self._kept_in(phase),
            "boundary gradients": 0.0 if boundary is None else self._boundary[boundary],
            "working set": 0.0 if working is None else self._working[working],
        }

    def _kept_in(self, phase: Phase) -> FloatArray | float:
        total: FloatArray | float = 0.0
        for name, count in phase.kept:
            kept, passing = count * self._kept[name], self._passing.get(name)
            total = total + (kept if passing is None else np.minimum(kept, passing))
        return total

    def _of_backward(self, kind: UnitKind) -> FloatArray:
        whole = self._micro.largest_bytes(kind.backward)
        if kind.saved is None or self._mode.recompute:
            return whole
        return np.maximum(whole - self._micro.largest_bytes(kind.saved), 0.0)

    def _left_behind(self, kind: UnitKind) -> Curve:
        if self._mode.recompute:
            return kind.kept
        assert kind.saved is not None, "the mode keeps graphs, which were not measured"
        return kind.saved


def free_bytes(profile: Profile, device_class: str) -> int:
    """What a device of this class has for tensors."""
    usable = usable_bytes(profile.cluster.class_named(device_class))
    return usable - profile.of_class(device_class).framework_bytes


def _up(sizes: FloatArray) -> FloatArray:
    return np.ceil(sizes)
