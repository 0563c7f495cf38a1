"""Peak memory of a worker, by cause. All amounts are bytes.

Parameters, gradients and collective buffers are laid out by the engine before the first step.
Memory of samples peaks at a phase of `cost.memory_layout.activation_phases`. The layout is linear
in the worker's share of the state (its state, and the buffer that receives gradients), so a
choice of samples and micro-batch leaves room for a largest share: `MemoryModel.capacity`, used by
the planner's search. `cost.predict` counts a finished plan exactly, from the intervals of
`schema.plan.splitting.compute_shard_sizes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from operator import attrgetter

import numpy as np

from gpumix.cost.memory_layout.activation_phases import Pass, Phase, list_peak_phases
from gpumix.cost.memory_layout.buffer_slots import ALIGNMENT, GRADIENT_ROOMS
from gpumix.cost.memory_layout.curves import FloatArray, IntArray, MicroBatches, interpolate_bytes
from gpumix.cost.memory_layout.kept_graphs import KeptGraphs
from gpumix.cost.mixed_degrees import MixedDegreeProfile, RankModelProfile
from gpumix.cost.network.buckets import GRADIENT_BYTES, Buckets, UnitSize
from gpumix.cost.network.collective_times import CollectiveSeconds
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.curve import Curve
from gpumix.schema.plan.optimizer_state import get_cut_multiple
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype, Mode, Place
from gpumix.schema.profile.profile import ROOT, ModelProfile, Profile, UnitKind

# Bytes per owned element of the fp32 parameter and the fp32 gradient; optimizer state is separate.
MASTER_BYTES = 4
SHARD_GRADIENT_BYTES = 4

# Share of memory that an allocator cannot hand out. CUDA's caching allocator loses memory to
# fragmentation between blocks of unequal size; layered passes reuse equal blocks, so 6 % is enough.
# Allocation on the CPU is capped to the byte; 2 % covers temporaries of the framework's own
# kernels.
CUDA_RESERVE = 0.06
CPU_RESERVE = 0.02

# Extra buffers per bucket, at most, where tensor-parallel groups of different sizes divide a model.
MAX_EXTRA_BUFFERS_PER_BUCKET = 2

# A cut rounds both ends of an interval: at most one element a bucket, one more for the float sums.
ROUNDING_ELEMENTS = 2


@dataclass(frozen=True)
class OwnedState:
    """Storage of one rank: elements of one bucket of each name, all frozen bytes of the rank, those
    of them that are packed, and the number of ranks dividing the state."""

    elements: tuple[tuple[str, int], ...]  # by name
    frozen_bytes: int
    packed_bytes: int
    ranks: int


def compute_usable_bytes(device_class: DeviceClass) -> int:
    """Return the bytes of a device's memory that a plan may fill, including framework overhead."""
    reserve = CUDA_RESERVE if device_class.is_gpu else CPU_RESERVE
    return int(device_class.memory_bytes * (1.0 - reserve))


def compute_owned_state(
    buckets: Buckets, shares: tuple[float, ...], multiple: int = 1
) -> tuple[OwnedState, ...]:
    """Return the exact storage of each rank at the given shares; with cuts at multiples of
    `multiple` elements of a parameter, the most that it can be."""
    counts, sizes = buckets.counts(), buckets.sizes
    trainable = {
        name: _bound_sizes(size.trainable, shares, multiple) for name, size in sizes.items()
    }
    floats, packed = (
        {name: compute_shard_sizes(of(size), shares) for name, size in sizes.items()}
        for of in (attrgetter("frozen_float_bytes"), attrgetter("packed_bytes"))
    )
    found = []
    for rank in range(len(shares)):
        own_packed = sum(n * packed[name][rank] for name, n in counts.items())
        own_floats = sum(n * floats[name][rank] for name, n in counts.items())
        elements = tuple((name, owned[rank]) for name, owned in trainable.items())
        found.append(OwnedState(elements, own_floats + own_packed, own_packed, len(shares)))
    return tuple(found)


def _bound_sizes(numel: int, shares: tuple[float, ...], multiple: int) -> tuple[int, ...]:
    """Return the most elements that each worker can own: each end moves by half a multiple."""
    sizes = compute_shard_sizes(numel, shares)
    if multiple == 1 or len(shares) == 1:
        return sizes
    return tuple(
        min(numel, size + multiple) if share > 0 else 0 for size, share in zip(sizes, shares)
    )


def compute_owned_by_rank_buckets(
    buckets: Sequence[Buckets], shares: tuple[float, ...], multiple: int = 1
) -> tuple[OwnedState, ...]:
    """Return the exact storage of each rank where ranks have different buckets."""
    distinct = {id(of_rank): of_rank for of_rank in buckets}
    found = {
        key: compute_owned_state(of_rank, shares, multiple) for key, of_rank in distinct.items()
    }
    return tuple(found[id(of_rank)][rank] for rank, of_rank in enumerate(buckets))


@dataclass(frozen=True)
class MemoryDemands:
    """Memory of many choices: bytes without state, and bytes per share of the state, on device and
    host.

    `rounding` is reserved for the rounding of a cut, so that every share up to the capacity fits.
    """

    fixed_bytes: FloatArray
    rounding: float
    per_share: float
    host_fixed: FloatArray
    host_per_share: float

    def capacity(self, free_bytes: float, host_bytes: float | None) -> FloatArray:
        """Return the largest share of the state, at most 1, that each choice leaves room for.

        `free_bytes` is device memory without the framework, `host_bytes` the device's part of host
        memory (None: no limit). -1 where a choice does not fit even without state.
        """
        room = free_bytes - self.fixed_bytes
        share = (room - self.rounding) / self.per_share
        if host_bytes is not None:
            room_there = host_bytes - self.host_fixed
            if self.host_per_share:
                share = np.minimum(share, room_there / self.host_per_share)
            room = np.minimum(room, room_there)
        return np.where(room >= 0, np.clip(share, 0.0, 1.0), -1.0)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of a model with state divided over `ranks` ranks, for any samples, micro-batch, mode,
    share and measured dtype."""

    profile: Profile
    links: CollectiveSeconds
    ranks: int
    zero_stage: ZeroStage = 3

    def demands(self, held: Activations, *, state_on: Place = "device") -> MemoryDemands:
        """Return the peak memory of each choice, for comparison with any memory size."""
        state = self.state(held.model, state_on)
        divided = self.zero_stage > 0
        return MemoryDemands(
            fixed_bytes=sum(state.fixed_bytes_by_cause.values()) + held.most,
            rounding=state.rounding,
            per_share=state.bytes_per_share,
            host_fixed=held.on_host
            + (state.arriving_bytes_on_host if divided else state.on_host_bytes),
            host_per_share=state.on_host_bytes if divided else 0,
        )

    def state(self, model: ModelProfile, state_on: Place = "device") -> StateModel:
        """Return the memory independent of samples, on a device computing this model."""
        key = (id(model), state_on)
        if key not in self._states:
            self._states[key] = StateModel(
                self.profile, self.links, self.ranks, self.zero_stage, model, state_on
            )
        return self._states[key]

    @cached_property
    def _states(self) -> dict[tuple[int, Place], StateModel]:
        return {}

    def is_size_one_smallest(self, largest: int) -> bool:
        """Check if micro-batches of one sample take the least memory of all cuts.

        True where keeping m samples at once takes at least m times one sample's memory, up to
        `largest` and except for rounding errors.
        """
        models: list[ModelProfile] = [self.profile.model, *self.profile.other_models]
        if isinstance(self.profile, MixedDegreeProfile):
            models = [*self.profile.models.values()]
        return all(_is_size_one_smallest(model, largest) for model in models)

    def peaks(
        self, held: Activations, owned: Sequence[OwnedState], *, state_on: Place = "device"
    ) -> list[dict[str, int]]:
        """Return the peak by cause, without the framework, of each choice storing `owned`."""
        found: list[dict[str, int]] = []
        state = self.state(held.model, state_on)
        of_samples = [held.by_cause(phase) for phase in held.phases]
        for place, (own, number) in enumerate(zip(owned, np.argmax(held.bytes_by_phase, axis=0))):
            laid_out = state.fixed_bytes_by_cause
            arriving = state.received_bytes(dict(own.elements), own.ranks)
            causes = {"state": state.owned_bytes(own)} | laid_out
            causes["gradients"] = laid_out["gradients"] + arriving
            samples = of_samples[number]
            found.append(causes | {cause: _at(samples[cause], place) for cause in samples})
        return found


def _is_size_one_smallest(model: ModelProfile, largest: int) -> bool:
    sizes = np.arange(1, largest + 1)
    of_calls = (c for k in model.kinds for c in (k.kept, k.gradient, k.saved) if c is not None)
    together = [interpolate_bytes(curve, sizes) for curve in (model.root.kept, *of_calls)]
    return all(bool((values >= sizes * values[0] * (1 - 1e-12)).all()) for values in together)


@dataclass(frozen=True)
class StateModel:
    """Memory of state and collective buffers on a device, independent of samples.

    Each ZeRO stage shards more: the optimizer state, and fp32 parameters stored next to a rounded
    copy (1), gradients (2), parameters (3). Parameters without rounding are their own masters. Data
    arriving in a dtype other than the device's needs memory of its own, and frozen parameters are
    stored as they are gathered.

    With CPU offload of the state, a device keeps no fp32 parameters, no reduced gradients and no
    optimizer state: only its compute copy.
    """

    profile: Profile
    links: CollectiveSeconds
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
        return (
            buckets.rebuild_for_model(self.model)
            if isinstance(self.model, RankModelProfile)
            else buckets
        )

    @property
    def _in_parts(self) -> bool:
        """Flag: parameters arrive in several parts, because larger groups divide them further."""
        return isinstance(self.model, RankModelProfile) and self.model.in_parts

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
        """Mean bytes per element of state stored by the owner alone."""
        if self.state_on == "host":
            return 0.0
        rounded = self._casts or self.compute_dtype != "fp32"
        masters = MASTER_BYTES * (1.0 if self.zero_stage == 3 or rounded else self._part_in_parts)
        gradient = SHARD_GRADIENT_BYTES * (1.0 if self.zero_stage >= 2 else self._part_in_parts)
        return masters + gradient + self.profile.optimizer_bytes_per_element

    @cached_property
    def _part_in_parts(self) -> float:
        """Fraction of elements arriving in several parts, stored apart from the compute copy."""
        if not isinstance(self.model, RankModelProfile) or not self.model.in_parts:
            return 0.0
        return 1.0 - self.model.undivided.parameters / max(1, self.model.parameters)

    @cached_property
    def _divided(self) -> Mapping[str, UnitSize]:
        """Divided size of each bucket; zero unless tensor-parallel groups differ in size."""
        if not isinstance(self.model, RankModelProfile):
            return dict.fromkeys(self.sizes, UnitSize(0, 0))
        rest = self.buckets.rebuild_for_model(self.model.undivided).sizes
        return {
            name: UnitSize(
                size.trainable - rest[name].trainable,
                size.frozen_bytes - rest[name].frozen_bytes,
                size.packed_bytes - rest[name].packed_bytes,
            )
            for name, size in self.sizes.items()
        }

    @cached_property
    def on_host_bytes(self) -> int:
        """Bytes of the whole model's state on the host, with offload, that shares divide."""
        frozen = sum(n * self.sizes[name].frozen_bytes for name, n in self.counts.items())
        return self._bytes_on_host(self.model.parameters, frozen)

    def owned_bytes_on_host(self, owned: OwnedState) -> int:
        """Return the bytes on the host of a rank storing `owned`."""
        if self.zero_stage == 0:
            return self.on_host_bytes
        state = self._bytes_on_host(self._elements(owned), owned.frozen_bytes)
        return state + self.arriving_bytes_on_host

    @cached_property
    def arriving_bytes_on_host(self) -> int:
        """Bytes on the host where gradients of a rank arrive, with parameters on the host."""
        if self.links.parameters_on == "device":
            return 0
        return GRADIENT_ROOMS * max(size.gradient_bytes for size in self.sizes.values())

    def _elements(self, owned: OwnedState) -> int:
        return sum(self.counts[name] * n for name, n in owned.elements)

    def _bytes_on_host(self, elements: int, frozen: int) -> int:
        if self.state_on == "device":
            return 0
        if self.links.parameters_on == "device":
            frozen = 0
        per_element = MASTER_BYTES + SHARD_GRADIENT_BYTES + self.profile.optimizer_bytes_per_element
        if self.gathered_dtype != "fp32":  # masters, rounded for the device
            per_element += DTYPE_BYTES[self.gathered_dtype]
        return ceil(elements * per_element) + frozen

    @cached_property
    def sharded_bytes(self) -> int:
        """Bytes of the whole model's state, as far as shares divide it."""
        return 0 if self.zero_stage == 0 else self._whole_bytes

    @cached_property
    def _whole_bytes(self) -> int:
        sizes = [(n, self.sizes[name]) for name, n in self.counts.items()]
        frozen = sum(n * size.frozen_bytes for n, size in sizes)
        packed = sum(n * size.packed_bytes for n, size in sizes)
        stored = self._stored_frozen(frozen, packed)
        return ceil(self.model.parameters * self.sharded_per_element) + stored

    @cached_property
    def replicated_bytes(self) -> int:
        """Bytes of state replicated on every rank."""
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

    def _stored_frozen(self, frozen: int, packed: int) -> int:
        """Return the bytes of frozen parameters beyond the compute copy; packed ones need none."""
        if self.links.parameters_on == "host":
            return 0
        if self.zero_stage == 3 or self._in_parts:
            return frozen
        return frozen - packed if self._casts else 0

    @cached_property
    def fixed_bytes_by_cause(self) -> dict[str, int]:
        """Bytes by cause, independent of samples and share."""
        gathered = gradients = 0
        if self.zero_stage == 3:
            gathered = self._full_bytes
        if self.zero_stage >= 2:
            gradients = self.buckets.gradient_bytes(self.zero_stage)
        if self._casts:
            gathered += self.buckets.arriving_bytes(self.gathered_dtype)
        if isinstance(self.model, RankModelProfile):
            gathered += MAX_EXTRA_BUFFERS_PER_BUCKET * ALIGNMENT * len(self.buckets.names)
            gradients += MAX_EXTRA_BUFFERS_PER_BUCKET * ALIGNMENT * len(self.buckets.names)
        if self._in_parts:  # of one bucket, as it arrives, and as it is passed on
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
        """Bytes reserved for the rounding of a cut."""
        moved = ROUNDING_ELEMENTS + get_cut_multiple(self.profile.optimizer_state) - 1
        filled = (n for name, n in self.counts.items() if self.sizes[name] != UnitSize(0, 0))
        received = self.received_bytes(dict.fromkeys(self.sizes, moved), self.ranks)
        return moved * sum(filled) * (ceil(self.sharded_per_element) + 1) + received

    @cached_property
    def bytes_per_share(self) -> int:
        """Additional bytes at share 1 compared to share 0; at least 1."""
        whole = {name: size.trainable for name, size in self.sizes.items()}
        return max(1, self.sharded_bytes + self.received_bytes(whole, self.ranks))

    def owned_bytes(self, owned: OwnedState) -> int:
        """Return the bytes of state of a rank storing `owned`."""
        if self.zero_stage == 0:
            return 0
        stored = self._stored_frozen(owned.frozen_bytes, owned.packed_bytes)
        return ceil(self._elements(owned) * self.sharded_per_element) + stored

    def received_bytes(self, own: Mapping[str, int], ranks: int) -> int:
        """Return the bytes of the buffers receiving all ranks' parts of the own interval to sum,
        and for the sum over hosts. `own` is the interval's length by bucket. Reductions run one at
        a time and reuse the memory."""
        if self.zero_stage == 0:
            return 0
        arriving = [own[name] for name in self.links.all_to_all] if ranks > 1 else []
        copied = self.links.copied_rows * max(own.values())
        most = ranks * max(arriving, default=0)
        if isinstance(self.model, RankModelProfile):  # undivided ones arrive apart, from all
            apart = (own[name] * self._part_undivided(name) for name in self.links.all_to_all)
            most += ranks * self.model.degree * ceil(max(apart, default=0.0))
        return (most + copied) * GRADIENT_BYTES

    def _part_undivided(self, name: str) -> float:
        """Return the fraction of a bucket's elements that no tensor-parallel group divides."""
        size = self.sizes[name].trainable
        return 1.0 - self._divided[name].trainable / size if size else 0.0


def _at(sizes: FloatArray | float, place: int) -> int:
    return int(sizes if isinstance(sizes, float) else sizes[place])


class Activations:
    """Memory of samples in each phase, with each curve summed once. Whole bytes, rounded up.

    In layered order all micro-batches wait at every call. In sequential order only one waits; its
    backward keeps the gradient of a unit called several times until the last call is done. Without
    activation checkpointing a call leaves its graph behind, and its own working set is that much
    smaller. With CPU offload, activations pass through two buffers of one micro-batch each, but
    tensors of the model itself between two calls are on the device.

    Args:
        kept_graphs: for each worker, the number of (call, micro-batch) pairs exempt from activation
            checkpointing: the last in the forward pass.
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
        self._kept = {name: np.ceil(together(curve)) for name, curve in left.items()}
        self._kept[ROOT] = np.ceil(together(model.root.kept))
        self._passing: dict[str, FloatArray] = {}
        if mode.boundary == "host":
            self._passing = {
                n: np.ceil(2 * micro.largest_bytes(curve)) for n, curve in left.items()
            }
        self._boundary = {name: np.ceil(together(k.gradient)) for name, k in self._kinds.items()}
        head = model.root.head if mode.head == "whole" else model.root.chunked_cross_entropy
        assert head is not None, "the mode uses chunked cross-entropy, which was not measured"
        self._working: dict[tuple[str, Pass], FloatArray] = {
            (ROOT, "head"): np.ceil(micro.largest_bytes(head)),
            (ROOT, "backward"): np.ceil(micro.largest_bytes(model.root.backward or head)),
        }
        for name, kind in self._kinds.items():
            forward, backward = _working_sets(kind, kept=not mode.recompute)
            self._working[name, "forward"] = np.ceil(micro.largest_bytes(forward))
            self._working[name, "backward"] = np.ceil(micro.largest_bytes(backward))
        self._graphs: KeptGraphs | None = None
        if kept_graphs is not None and kept_graphs.any():
            self._graphs = KeptGraphs(model, micro, kept_graphs, mode)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of a step."""
        return list_peak_phases(self.model, every_call=self._graphs is not None)

    @cached_property
    def bytes_by_phase(self) -> FloatArray:
        """Bytes on the device by phase, all causes together; the phases are the first axis."""
        found = np.empty((len(self.phases), *self._micro.size.shape))
        for place, phase in enumerate(self.phases):
            found[place] = sum(self.by_cause(phase).values())
        return found

    @cached_property
    def most(self) -> FloatArray:
        """Bytes on the device at the peak."""
        return np.asarray(self.bytes_by_phase.max(axis=0))

    @cached_property
    def on_host(self) -> FloatArray:
        """Peak bytes left by calls on the host until the backward pass."""
        most = np.zeros(self._micro.size.shape)
        if self._mode.boundary == "host":
            for phase in self.phases:
                kept = (count * self._kept[name] for name, count in phase.kept if name != ROOT)
                most = np.maximum(most, sum(kept))
        return most

    def by_cause(self, phase: Phase) -> dict[str, FloatArray | float]:
        """Return the bytes on the device in `phase`: activations kept for backward, gradients
        between two calls of all micro-batches in flight, and the working set of the current one."""
        return {
            "activations": self._kept_in(phase),
            "boundary gradients": self._gradients_in(phase),
            "working set": self._working_in(phase) + self._compute_revisited_gradients(phase),
        }

    def _gradients_in(self, phase: Phase) -> FloatArray | float:
        if phase.boundary is None:
            return 0.0
        micro, boundary = self._micro, self._boundary[phase.boundary]
        samples = micro.full * micro.size + micro.rest if self._layered else micro.size
        waiting: FloatArray = np.ceil(phase.waiting * samples)
        return boundary + waiting

    def _compute_revisited_gradients(self, phase: Phase) -> FloatArray | float:
        if self._layered or not phase.again:
            return 0.0
        held = sum(self._kinds[name].trainable for name in phase.again) * GRADIENT_BYTES
        return np.where(self._micro.size > 0, float(held), 0.0)

    def _working_in(self, phase: Phase) -> FloatArray:
        """Return the working set of the largest micro-batch, where some keep the call's graph."""
        working, (name, computed) = self._working[phase.computation], phase.computation
        if self._graphs is None or name == ROOT:
            return working
        forward, backward = _working_sets(self._kinds[name], kept=True)
        curve, call = forward if computed == "forward" else backward, phase.calls - 1
        keeping = np.ceil(interpolate_bytes(curve, self._graphs.largest(call)))
        return np.where(self._graphs.all_kept(call), keeping, np.maximum(working, keeping))

    def _kept_in(self, phase: Phase) -> FloatArray | float:
        total: FloatArray | float = 0.0
        standing = Counter(phase.referenced_by_model)
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
    """Return the forward and backward working sets of a call with or without a kept graph."""
    if not kept:
        return kind.forward, kind.backward
    assert kind.saved_forward and kind.saved_backward, "graphs are kept, which were not measured"
    return kind.saved_forward, kind.saved_backward


def get_element_bytes(
    profile: Profile, device_class: str, zero_stage: ZeroStage
) -> tuple[float, float]:
    """Return the bytes per parameter element on each device of a class, and at the owner, without
    collective buffers. At stage 0 every device owns all elements."""
    dtype = profile.of_class(device_class).compute_dtype
    whole = (DTYPE_BYTES[dtype] if zero_stage < 3 else 0) + (4 if zero_stage < 2 else 0)
    owned = profile.optimizer_bytes_per_element
    owned += MASTER_BYTES if zero_stage == 3 or dtype != "fp32" else 0
    owned += SHARD_GRADIENT_BYTES if zero_stage >= 2 else 0
    return (whole + owned, 0.0) if zero_stage == 0 else (whole, owned)


def compute_free_bytes(profile: Profile, device_class: str) -> int:
    """Return the bytes of a device of this class available to tensors."""
    usable = compute_usable_bytes(profile.cluster.class_named(device_class))
    return usable - profile.of_class(device_class).framework_bytes
