"""How many bytes a worker holds at its peak, by cause. All amounts are bytes.

Parameters, gradients and what collectives fill lie where the engine laid them out before the first
step; what samples hold is largest at one of the moments in `cost.phases`. What is laid out is
linear in the worker's share of the state (its state, and the buffer that receives gradients), so a
choice of samples and micro-batch leaves room for a largest share: `MemoryModel.capacity`, which the
planner searches with. `cost.predict` counts a finished plan exactly, by the intervals that
`spec.cut.cut` gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from gpumix.cost.buckets import GRADIENT_BYTES, Buckets, UnitSize
from gpumix.cost.curves import FloatArray, IntArray, MicroBatches, bytes_at
from gpumix.cost.network import Links
from gpumix.cost.of_ranks import ModelOfRank, ProfileOfRanks
from gpumix.cost.phases import Pass, Phase, phases
from gpumix.cost.slots import ALIGNMENT
from gpumix.spec.cluster import DeviceClass
from gpumix.spec.curve import Curve
from gpumix.spec.cut import cut_sizes
from gpumix.spec.plan import ZeroStage
from gpumix.spec.profile import ROOT, ModelProfile, Profile, UnitKind
from gpumix.spec.stage import DTYPE_BYTES, ComputeDtype, Mode, Place

# An owned element: its fp32 parameter and its fp32 gradient, the optimizer's state apart.
MASTER_BYTES = 4
SHARD_GRADIENT_BYTES = 4

# What an allocator cannot hand out. CUDA's caching allocator loses memory to fragments between
# blocks of unlike size; layered passes reuse equal blocks, so 6 % is left for that. Allocation on
# the CPU is capped to the byte; 2 % covers the temporaries of the framework's own kernels.
CUDA_RESERVE = 0.06
CPU_RESERVE = 0.02

# Where teams of unlike sizes divide a model, a bucket has up to so many buffers more.
GROUPS_APART = 2

# A cut rounds both ends of an interval: at most one element a bucket, one more for the float sums.
ROUNDING_ELEMENTS = 2


@dataclass(frozen=True)
class Owned:
    """What one rank stores: elements of one bucket of each name, and all its frozen bytes; and how
    many ranks divide the state with it, itself among them."""

    elements: tuple[tuple[str, int], ...]  # by name
    frozen_bytes: int
    ranks: int


def usable_bytes(device_class: DeviceClass) -> int:
    """What a plan may fill of a device's memory, the framework's own bytes included."""
    reserve = CUDA_RESERVE if device_class.is_gpu else CPU_RESERVE
    return int(device_class.memory_bytes * (1.0 - reserve))


def owned_by_rank(buckets: Buckets, shares: tuple[float, ...]) -> tuple[Owned, ...]:
    """What each rank stores at these shares, to the element."""
    counts, sizes = buckets.counts(), buckets.sizes
    trainable = {name: cut_sizes(size.trainable, shares) for name, size in sizes.items()}
    frozen = {name: cut_sizes(size.frozen_bytes, shares) for name, size in sizes.items()}
    return tuple(
        Owned(
            elements=tuple((name, owned[rank]) for name, owned in trainable.items()),
            frozen_bytes=sum(n * frozen[name][rank] for name, n in counts.items()),
            ranks=len(shares),
        )
        for rank in range(len(shares))
    )


def owned_by_each(buckets: Sequence[Buckets], shares: tuple[float, ...]) -> tuple[Owned, ...]:
    """The same where ranks have unlike parts of a model: of each its buckets."""
    distinct = {id(of_rank): of_rank for of_rank in buckets}
    found = {key: owned_by_rank(of_rank, shares) for key, of_rank in distinct.items()}
    return tuple(found[id(of_rank)][rank] for rank, of_rank in enumerate(buckets))


@dataclass(frozen=True)
class Demands:
    """Bytes of many choices: without state, and what a share of it adds; on the device, and on its
    host.

    `rounding` is set aside for the rounding of a cut, so that every share up to the capacity fits.
    """

    fixed: FloatArray
    rounding: float
    per_share: float
    host_fixed: FloatArray
    host_per_share: float

    def capacity(self, free_bytes: float, host_bytes: float | None) -> FloatArray:
        """The largest share of the state, at most 1, that each choice leaves room for.

        `free_bytes` is what the device has besides the framework, `host_bytes` what its host has
        for it (None: no limit). -1 where the choice does not fit even without state.
        """
        room = free_bytes - self.fixed
        share = (room - self.rounding) / self.per_share
        if host_bytes is not None:
            room_there = host_bytes - self.host_fixed
            share = np.minimum(share, room_there / max(1.0, self.host_per_share))
            room = np.minimum(room, room_there)
        return np.where(room >= 0, np.clip(share, 0.0, 1.0), -1.0)


@dataclass(frozen=True)
class MemoryModel:
    """What a model holds whose state is divided over `ranks` ranks, for any samples, micro-batch,
    mode and share, in any dtype that was measured."""

    profile: Profile
    links: Links
    ranks: int
    zero_stage: ZeroStage = 3

    def demands(self, held: Activations, *, state_on: Place = "device") -> Demands:
        """What each choice takes at its peak, to compare with any amount of memory."""
        state = self.state(held.model, state_on)
        divided = self.zero_stage > 0
        return Demands(
            fixed=sum(state.laid_out.values()) + held.most,
            rounding=state.rounding,
            per_share=state.bytes_per_share,
            host_fixed=held.on_host + (0 if divided else state.on_host_bytes),
            host_per_share=state.on_host_bytes if divided else 0,
        )

    def state(self, model: ModelProfile, state_on: Place = "device") -> StateModel:
        """What does not depend on samples, on a device that computes this model."""
        key = (id(model), state_on)
        if key not in self._states:
            self._states[key] = StateModel(
                self.profile, self.links, self.ranks, self.zero_stage, model, state_on
            )
        return self._states[key]

    @cached_property
    def _states(self) -> dict[tuple[int, Place], StateModel]:
        return {}

    def ones_are_least(self, largest: int) -> bool:
        """Whether no cut of samples takes less memory than micro-batches of one sample.

        True where keeping m samples at once takes at least m times what one takes, up to `largest`
        and but for the last digits.
        """
        models: list[ModelProfile] = [self.profile.model, *self.profile.other_models]
        if isinstance(self.profile, ProfileOfRanks):
            models = [*self.profile.models.values()]
        return all(_ones_are_least(model, largest) for model in models)

    def peaks(
        self, held: Activations, owned: Sequence[Owned], *, state_on: Place = "device"
    ) -> list[dict[str, int]]:
        """Peak by cause, the framework apart, of each choice, if it stores `owned`."""
        found: list[dict[str, int]] = []
        state = self.state(held.model, state_on)
        of_samples = [held.by_cause(phase) for phase in held.phases]
        for place, (own, number) in enumerate(zip(owned, np.argmax(held.in_phases, axis=0))):
            laid_out = state.laid_out
            arriving = state.received_bytes(dict(own.elements), own.ranks)
            causes = {"state": state.owned_bytes(own)} | laid_out
            causes["gradients"] = laid_out["gradients"] + arriving
            samples = of_samples[number]
            found.append(causes | {cause: _at(samples[cause], place) for cause in samples})
        return found


def _ones_are_least(model: ModelProfile, largest: int) -> bool:
    sizes = np.arange(1, largest + 1)
    of_calls = (c for k in model.kinds for c in (k.kept, k.gradient, k.saved) if c is not None)
    together = [bytes_at(curve, sizes) for curve in (model.root.kept, *of_calls)]
    return all(bool((values >= sizes * values[0] * (1 - 1e-12)).all()) for values in together)


@dataclass(frozen=True)
class StateModel:
    """What a device holds of the state, and of what collectives fill, whatever its samples are.

    Each ZeRO stage shards what the one before it replicates: the optimizer's state and the fp32
    parameters beside a rounded copy (1), the gradients (2), the parameters (3). Parameters that
    nothing rounds are their own masters. What arrives in another dtype than that of this device
    needs memory of its own, and frozen parameters are stored as they are gathered.

    With its state on the host a device keeps neither fp32 parameters nor their gradients, summed,
    nor the optimizer's state: only what it computes with.
    """

    profile: Profile
    links: Links
    ranks: int
    zero_stage: ZeroStage
    model: ModelProfile
    state_on: Place = "device"

    @property
    def compute_dtype(self) -> ComputeDtype:
        return self.model.compute_dtype

    @cached_property
    def buckets(self) -> Buckets:
        buckets = self.links.buckets
        return buckets.of_part(self.model) if isinstance(self.model, ModelOfRank) else buckets

    @property
    def _in_parts(self) -> bool:
        """Whether parameters arrive in parts, into which other ranks divide them."""
        return isinstance(self.model, ModelOfRank) and self.model.in_parts

    @property
    def sizes(self) -> Mapping[str, UnitSize]:
        return self.buckets.sizes

    @cached_property
    def counts(self) -> Mapping[str, int]:
        return self.buckets.counts()

    @property
    def gathered_dtype(self) -> ComputeDtype:
        return self.links.communication_dtype or self.compute_dtype

    @property
    def _casts(self) -> bool:
        return self.gathered_dtype != self.compute_dtype

    @cached_property
    def sharded_per_element(self) -> float:
        """Bytes of one element's state that its owner alone keeps; the mean over the model."""
        if self.state_on == "host":
            return 0.0
        rounded = self._casts or self.compute_dtype != "fp32"
        masters = MASTER_BYTES * (1.0 if self.zero_stage == 3 or rounded else self._part_in_parts)
        gradient = SHARD_GRADIENT_BYTES * (1.0 if self.zero_stage >= 2 else self._part_in_parts)
        return masters + gradient + self.profile.optimizer_bytes_per_element

    @cached_property
    def _part_in_parts(self) -> float:
        """Of all elements, those that arrive in several parts: apart from where they are used."""
        if not isinstance(self.model, ModelOfRank) or not self.model.in_parts:
            return 0.0
        return 1.0 - self.model.undivided.parameters / max(1, self.model.parameters)

    @cached_property
    def _divided(self) -> Mapping[str, UnitSize]:
        """Of each bucket what is divided into parts; nothing where no teams are of unlike sizes."""
        if not isinstance(self.model, ModelOfRank):
            return dict.fromkeys(self.sizes, UnitSize(0, 0))
        rest = self.buckets.of_part(self.model.undivided).sizes
        return {
            name: UnitSize(
                size.trainable - rest[name].trainable, size.frozen_bytes - rest[name].frozen_bytes
            )
            for name, size in self.sizes.items()
        }

    @cached_property
    def on_host_bytes(self) -> int:
        """State of the whole model, as far as it would be on the host."""
        return self._bytes_on_host(self.model.parameters)

    def owned_bytes_on_host(self, owned: Owned) -> int:
        """What a rank that stores `owned` keeps of it on its host."""
        if self.zero_stage == 0:
            return self.on_host_bytes
        return self._bytes_on_host(self._elements(owned))

    def _elements(self, owned: Owned) -> int:
        return sum(self.counts[name] * n for name, n in owned.elements)

    def _bytes_on_host(self, elements: int) -> int:
        if self.state_on == "device":
            return 0
        per_element = MASTER_BYTES + SHARD_GRADIENT_BYTES + self.profile.optimizer_bytes_per_element
        if self.gathered_dtype != "fp32":  # masters, rounded for the device
            per_element += DTYPE_BYTES[self.gathered_dtype]
        return ceil(elements * per_element)

    @cached_property
    def sharded_bytes(self) -> int:
        """State of the whole model, as far as the shares divide it."""
        return 0 if self.zero_stage == 0 else self._whole_bytes

    @cached_property
    def _whole_bytes(self) -> int:
        frozen = self._frozen_bytes if self._stores_frozen else 0
        return ceil(self.model.parameters * self.sharded_per_element) + frozen

    @cached_property
    def replicated_bytes(self) -> int:
        """State that every rank keeps whole."""
        if self.zero_stage == 3:
            return 0
        held = self._full_bytes
        if self.zero_stage <= 1:
            held += self.buckets.gradient_bytes(self.zero_stage)
        if self.zero_stage == 0:
            held += self._whole_bytes
        return held

    @property
    def _full_bytes(self) -> int:
        width, stored = DTYPE_BYTES[self.compute_dtype], DTYPE_BYTES[self.gathered_dtype]
        widened = max(1, width // stored)
        return self.buckets.full_bytes(self.compute_dtype, self.zero_stage, widened=widened)

    @property
    def _stores_frozen(self) -> bool:
        """Whether frozen parameters are stored beside those that are computed with."""
        return self.zero_stage == 3 or self._casts or self._in_parts

    @cached_property
    def _frozen_bytes(self) -> int:
        return sum(n * self.sizes[name].frozen_bytes for name, n in self.counts.items())

    @cached_property
    def laid_out(self) -> dict[str, int]:
        """Bytes by cause that depend neither on samples nor on the share."""
        gathered = gradients = 0
        if self.zero_stage == 3:
            gathered = self._full_bytes
        if self.zero_stage >= 2:
            gradients = self.buckets.gradient_bytes(self.zero_stage)
        if self._casts:
            gathered += self.buckets.arriving_bytes(self.gathered_dtype)
        if isinstance(self.model, ModelOfRank):
            gathered += GROUPS_APART * ALIGNMENT * len(self.buckets.names)
            gradients += GROUPS_APART * ALIGNMENT * len(self.buckets.names)
        if self._in_parts:  # of one bucket, as it arrives, and as it is handed over
            divided, width = self._divided.values(), DTYPE_BYTES[self.gathered_dtype]
            if not self._casts:
                gathered += max(s.trainable * width + s.frozen_bytes for s in divided)
            gradients += max(size.gradient_bytes for size in divided)
        return {
            "replicas": self.replicated_bytes,
            "buffers": self.profile.model.root.buffer_bytes,
            "gathered": gathered + self.links.padding_bytes,
            "gradients": gradients,
        }

    @cached_property
    def rounding(self) -> float:
        """What is set aside for the rounding of a cut."""
        one_off = dict.fromkeys(self.sizes, ROUNDING_ELEMENTS)
        filled = (n for name, n in self.counts.items() if self.sizes[name] != UnitSize(0, 0))
        elements = ROUNDING_ELEMENTS * sum(filled)
        received = self.received_bytes(one_off, self.ranks)
        return elements * (ceil(self.sharded_per_element) + 1) + received

    @cached_property
    def bytes_per_share(self) -> int:
        """What is held more at share 1 than at share 0; at least 1."""
        whole = {name: size.trainable for name, size in self.sizes.items()}
        return max(1, self.sharded_bytes + self.received_bytes(whole, self.ranks))

    def owned_bytes(self, owned: Owned) -> int:
        """State of a rank that stores `owned`."""
        if self.zero_stage == 0:
            return 0
        frozen = owned.frozen_bytes if self._stores_frozen else 0
        return ceil(self._elements(owned) * self.sharded_per_element) + frozen

    def received_bytes(self, own: Mapping[str, int], ranks: int) -> int:
        """The buffers in which all ranks' parts of the own interval arrive, to be summed there, and
        in which hosts add up theirs; `own` is the length of that interval by bucket. One reduction
        runs at a time, and the next one finds the same memory."""
        if self.zero_stage == 0:
            return 0
        arriving = [own[name] for name in self.links.all_to_all] if ranks > 1 else []
        copied = self.links.copied_rows * max(own.values())
        most = ranks * max(arriving, default=0)
        if isinstance(self.model, ModelOfRank):  # what no team divides arrives apart, from all
            apart = (own[name] * self._part_undivided(name) for name in self.links.all_to_all)
            most += ranks * self.model.degree * ceil(max(apart, default=0.0))
        return (most + copied) * GRADIENT_BYTES

    def _part_undivided(self, name: str) -> float:
        """Of the elements of a bucket, those that no team divides."""
        size = self.sizes[name].trainable
        return 1.0 - self._divided[name].trainable / size if size else 0.0


def _at(sizes: FloatArray | float, place: int) -> int:
    return int(sizes if isinstance(sizes, float) else sizes[place])


class Activations:
    """What samples hold in each phase, each curve summed once. Whole bytes, rounded up.

    In layers all micro-batches wait at every call; one after the other, only one does, whose one
    backward holds the gradient of a unit that is called again until it is through. Without
    recompute a call leaves its graph behind, and needs so much less for itself. What is kept on the
    host passes through two buffers of one micro-batch each; but what the model itself has between
    two calls is on the device.

    Args:
        kept_graphs: of each worker's pairs of call and micro-batch, how many keep their graph
            though the mode recomputes; those that come last in the forward pass.
    """

    def __init__(
        self,
        model: ModelProfile,
        micro: MicroBatches,
        mode: Mode,
        kept_graphs: IntArray | None = None,
    ) -> None:
        self.model = model
        self._micro = micro
        self._mode = mode
        self._kinds = {name: model.kind(name) for name in sorted(set(model.kind_of_call))}
        self._layered = mode.order == "layered"
        together = micro.bytes if self._layered else micro.largest_bytes
        left = {name: self._left_behind(kind) for name, kind in self._kinds.items()}
        self._kept = {name: _up(together(curve)) for name, curve in left.items()}
        self._kept[ROOT] = _up(together(model.root.kept))
        self._passing: dict[str, FloatArray] = {}
        if mode.boundary == "host":
            self._passing = {n: _up(2 * micro.largest_bytes(curve)) for n, curve in left.items()}
        self._boundary = {name: _up(together(k.gradient)) for name, k in self._kinds.items()}
        head = model.root.head if mode.head == "whole" else model.root.chunked_head
        assert head is not None, "the mode runs the head in chunks, which was not measured"
        self._working: dict[tuple[str, Pass], FloatArray] = {
            (ROOT, "head"): _up(micro.largest_bytes(head)),
            (ROOT, "backward"): _up(micro.largest_bytes(model.root.backward or head)),
        }
        for name, kind in self._kinds.items():
            forward, backward = _working_sets(kind, kept=not mode.recompute)
            self._working[name, "forward"] = _up(micro.largest_bytes(forward))
            self._working[name, "backward"] = _up(micro.largest_bytes(backward))
        self._graphs: _KeptGraphs | None = None
        if kept_graphs is not None and kept_graphs.any():
            self._graphs = _KeptGraphs(model, micro, kept_graphs, in_layers=self._layered)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The moments of a step."""
        return phases(self.model, every_call=self._graphs is not None)

    @cached_property
    def in_phases(self) -> FloatArray:
        """Bytes on the device by phase, all causes together; the phases are the first axis."""
        found = np.empty((len(self.phases), *self._micro.size.shape))
        for place, phase in enumerate(self.phases):
            found[place] = sum(self.by_cause(phase).values())
        return found

    @cached_property
    def most(self) -> FloatArray:
        """Bytes on the device at the peak."""
        return np.asarray(self.in_phases.max(axis=0))

    @cached_property
    def on_host(self) -> FloatArray:
        """The most that calls leave on the host until their backward."""
        most = np.zeros(self._micro.size.shape)
        if self._mode.boundary == "host":
            for phase in self.phases:
                kept = (count * self._kept[name] for name, count in phase.kept if name != ROOT)
                most = np.maximum(most, sum(kept))
        return most

    def by_cause(self, phase: Phase) -> dict[str, FloatArray | float]:
        """Bytes on the device in `phase`: what calls leave until their backward, gradients between
        two calls of all micro-batches that are under way, and what the one that is computed needs.
        """
        return {
            "activations": self._kept_in(phase),
            "boundary gradients": self._gradients_in(phase),
            "working set": self._working_in(phase) + self._of_units_again(phase),
        }

    def _gradients_in(self, phase: Phase) -> FloatArray | float:
        if phase.boundary is None:
            return 0.0
        micro, boundary = self._micro, self._boundary[phase.boundary]
        samples = micro.full * micro.size + micro.rest if self._layered else micro.size
        waiting: FloatArray = np.ceil(phase.waiting * samples)
        return boundary + waiting

    def _of_units_again(self, phase: Phase) -> FloatArray | float:
        if self._layered or not phase.again:
            return 0.0
        held = sum(self._kinds[name].trainable for name in phase.again) * GRADIENT_BYTES
        return np.where(self._micro.size > 0, float(held), 0.0)

    def _working_in(self, phase: Phase) -> FloatArray:
        """Of micro-batches of which some keep the graph of the call, whichever takes the most."""
        working, (name, computed) = self._working[phase.working], phase.working
        if self._graphs is None or name == ROOT:
            return working
        forward, backward = _working_sets(self._kinds[name], kept=True)
        curve, call = forward if computed == "forward" else backward, phase.calls - 1
        keeping = _up(bytes_at(curve, self._graphs.largest(call)))
        return np.where(self._graphs.all_kept(call), keeping, np.maximum(working, keeping))

    def _kept_in(self, phase: Phase) -> FloatArray | float:
        total: FloatArray | float = 0.0
        standing = Counter(phase.standing)
        for name, count in phase.kept:
            kept, passing = count * self._kept[name], self._passing.get(name)
            if passing is not None:
                kept = np.minimum(kept, passing + standing[name] * self._kept[name])
            total = total + kept
        if self._graphs is not None:
            total = total + self._graphs.bytes_before[phase.calls]
        return total

    def _left_behind(self, kind: UnitKind) -> Curve:
        if self._mode.recompute:
            return kind.kept
        assert kind.saved is not None, "the mode keeps graphs, which were not measured"
        return kind.saved


def _working_sets(kind: UnitKind, *, kept: bool) -> tuple[Curve, Curve]:
    """Of forward and of backward, of a call whose graph is kept or is not."""
    if not kept:
        return kind.forward, kind.backward
    assert kind.saved_forward and kind.saved_backward, "graphs are kept, which were not measured"
    return kind.saved_forward, kind.saved_backward


class _KeptGraphs:
    """What graphs add that are kept though the mode recomputes.

    Attributes:
        bytes_before: of all calls before each, and of all, as rows: what is held at once.
    """

    def __init__(
        self, model: ModelProfile, micro: MicroBatches, kept: IntArray, *, in_layers: bool
    ) -> None:
        self._micro, self._kept, self._calls = micro, kept, len(model.calls)
        rows = [np.zeros(micro.size.shape)]
        for call, name in enumerate(model.kind_of_call):
            kind = model.kind(name)
            assert kind.saved is not None, "graphs are kept, which were not measured"
            full, rest = micro.last_of(self.of_call(call))
            more = [_up(bytes_at(kind.saved, n)) - _up(bytes_at(kind.kept, n)) for n in
                    (micro.size, micro.rest)]  # fmt: skip
            if in_layers:
                added = full * more[0] + rest * more[1]
            else:  # one micro-batch at a time: the one that keeps the most of this call
                smaller = _up(bytes_at(kind.saved, micro.rest)) - _up(
                    bytes_at(kind.kept, micro.size)
                )
                added = np.where(full > 0, more[0], np.where(rest > 0, smaller, 0.0))
            rows.append(rows[-1] + np.maximum(added, 0.0))
        self.bytes_before = np.stack(rows)

    def of_call(self, call: int) -> IntArray:
        """How many of the micro-batches keep the graph of `call`."""
        count = self._micro.count
        return np.asarray(np.clip(self._kept - (self._calls - 1 - call) * count, 0, count))

    def largest(self, call: int) -> IntArray:
        """Samples of the largest micro-batch that keeps the graph of `call`; 0 if none does."""
        full, rest = self._micro.last_of(self.of_call(call))
        return np.where(full > 0, self._micro.size, np.where(rest > 0, self._micro.rest, 0))

    def all_kept(self, call: int) -> IntArray:
        """Where all micro-batches keep the graph of `call`."""
        return np.asarray(self.of_call(call) == self._micro.count)


def element_bytes(
    profile: Profile, device_class: str, zero_stage: ZeroStage
) -> tuple[float, float]:
    """What one parameter element takes on each device of a class, and where it is owned, beside
    what collectives fill; at stage 0 every device owns it."""
    dtype = profile.of_class(device_class).compute_dtype
    whole = (DTYPE_BYTES[dtype] if zero_stage < 3 else 0) + (4 if zero_stage < 2 else 0)
    owned = profile.optimizer_bytes_per_element
    owned += MASTER_BYTES if zero_stage == 3 or dtype != "fp32" else 0
    owned += SHARD_GRADIENT_BYTES if zero_stage >= 2 else 0
    return (whole + owned, 0.0) if zero_stage == 0 else (whole, owned)


def free_bytes(profile: Profile, device_class: str) -> int:
    """What a device of this class has for tensors."""
    usable = usable_bytes(profile.cluster.class_named(device_class))
    return usable - profile.of_class(device_class).framework_bytes


def _up(sizes: FloatArray) -> FloatArray:
    return np.ceil(sizes)
