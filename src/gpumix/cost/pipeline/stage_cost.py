"""Time and memory of one pass of micro-batches through one stage, for each worker.

The stage is a model of its own (`cost.pipeline.stage_model`), so the cost model of one stage
applies. `cost.pipeline.staged_step` combines a rank's passes into a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gpumix.cost.memory_layout.activation_phases import Pass
from gpumix.cost.memory_layout.curves import FloatArray, MicroBatches
from gpumix.cost.network.buckets import BEFORE, BucketGrouping
from gpumix.cost.network.collective_times import (
    BufferCuts,
    ShardedLayout,
    compute_collective_seconds,
    make_free_collectives,
)
from gpumix.cost.network.link_times import build_subset_link_model
from gpumix.cost.peak_memory import (
    Activations,
    MemoryModel,
    OwnedState,
    StateModel,
    compute_owned_by_rank_buckets,
)
from gpumix.cost.pipeline.stage_model import StagedModel
from gpumix.cost.step_time import (
    compute_optimizer_seconds,
    compute_pass_seconds,
    compute_split_backward,
)
from gpumix.cost.tensor_parallel_groups import StageLeaders
from gpumix.schema.cluster.link_islands import Near
from gpumix.schema.curve import Curve
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype, Mode, Worker
from gpumix.schema.profile.profile import ROOT, ModelProfile

NO_SAMPLES = (0, 0)


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one pass through a stage's units on a worker. `forward_s` and `backward_s` are
    computation only; `first_s` and `last_s` include gathers of parameters and reductions of
    gradients; `weights_s` and `weights_last_s` are for the deferred part of a split backward."""

    forward_s: float
    first_s: float
    backward_s: float
    last_s: float
    weights_s: float = 0.0
    weights_last_s: float = 0.0


@dataclass(frozen=True)
class PassBytes:
    """Bytes of one pass through a stage's units, without other micro-batches: `left` until its
    backward, `split` after the first part of a split backward, and the peaks by cause of forward,
    of head and loss, and of backward."""

    left: int
    split: int
    forward: dict[str, int]
    head: dict[str, int]
    backward: dict[str, int]


class StageCost:
    """Cost of one stage of a plan.

    Args:
        near: the network distance between its workers.
        moved: communication takes time.
    """

    def __init__(
        self,
        of: StageLeaders,
        cut: StagedModel,
        plan: Plan,
        number: int,
        *,
        near: Near,
        moved: bool,
    ) -> None:
        stage, whole = plan.stages[number], of.profile
        self.plan, self.number, self.workers = plan, number, of.leaders
        self.profile = cut.get_stage_profile(whole, number)
        places = [(w.host, w.device_class) for w in self.workers]
        layout = ShardedLayout(
            plan.zero_stage,
            "all",
            plan.collectives,
            BufferCuts.at(stage.shares, plan.cut_multiple),
            plan.communication_dtype,
            BucketGrouping(stage.joined),
        )
        links = compute_collective_seconds(
            self.profile, build_subset_link_model(whole, places, near), layout
        )
        free = make_free_collectives(links.buckets)
        self.links = links if moved else free
        self._free = free
        self.memory = MemoryModel(self.profile, links, len(self.workers), plan.zero_stage)
        # Computed before accumulation: the gradient of tables looked up by the code before the
        # first unit.
        sizes = {p.name: p.trainable for p in whole.model.root.parameters}
        self._looked_up = max((sizes[n] for n in whole.model.needs[0].root), default=0)
        self._looked_up *= number == 0
        # Workers of a kind are alike: by the number of the first of each kind.
        kinds: dict[tuple[str, Mode, ComputeDtype], int] = {}
        self.kind_of = [
            kinds.setdefault((w.device_class, w.mode, w.compute_dtype), number)
            for number, w in enumerate(self.workers)
        ]
        self._passes: dict[tuple[int, int, int], PassSeconds] = {}
        self._held: dict[tuple[int, int, int], PassBytes] = {}

    def micro_batches(self, worker: int, batch: int) -> tuple[int, int]:
        """Return a worker's samples in one micro-batch or wave, and the most of them at once."""
        return self.amounts[worker].get(batch, NO_SAMPLES)

    @cached_property
    def amounts(self) -> list[dict[int, tuple[int, int]]]:
        """Samples, and the most of them at once, of each worker by micro-batch or wave."""
        found: list[dict[int, list[int]]] = [{} for _ in self.workers]
        in_waves = self.plan.in_waves
        stage = self.plan.stages[self.number]
        for number, one in enumerate(stage.micro_batches(self.plan.waves)):
            key = one.wave if in_waves else number
            found[one.worker].setdefault(key, []).append(len(one.rows))
        return [
            {batch: (sum(sizes), max(sizes)) for batch, sizes in of_worker.items()}
            for of_worker in found
        ]

    def passes(self, worker: int, batch: int) -> PassSeconds:
        """Return the seconds of a worker's part of a micro-batch or wave."""
        samples, size = self.micro_batches(worker, batch)
        key = (self.kind_of[worker], samples, size)
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = self._timed(self.workers[worker], samples, size)
        return found

    def _timed(self, worker: Worker, samples: int, size: int) -> PassSeconds:
        name, mode = worker.device_class, make_layered(worker.mode)
        micro = MicroBatches.of([samples], [size])
        both = self._free, self.links
        (forward, backward), (first, last) = (
            map(_one, compute_pass_seconds(self.profile, name, links, micro, mode))
            for links in both
        )
        kind = self.links.buckets.kind(0)
        gathered, reduced = self.links.gather_s[kind], self.links.reduce_s[kind]
        if not self.plan.puts_off(self.number, worker):
            return PassSeconds(forward, first + gathered, backward, last + reduced)
        (backward, weights), (last, weights_last) = (
            map(_one, compute_split_backward(self.profile, name, links, micro, mode))
            for links in both
        )
        return PassSeconds(
            forward, first + gathered, backward, last, weights, weights_last + reduced
        )

    def held(self, worker: int, batch: int) -> PassBytes:
        """Return the bytes of a worker's part of a micro-batch or wave."""
        samples, size = self.micro_batches(worker, batch)
        key = (self.kind_of[worker], samples, size)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._counted(self.workers[worker], samples, size)
        return found

    def _counted(self, worker: Worker, samples: int, size: int) -> PassBytes:
        model = self.profile.model_of(worker.device_class)
        micro = MicroBatches.of([samples], [size])
        held = _find_pass_peaks(Activations(model, micro, make_layered(worker.mode)))
        if self.plan.schedule == "zero-bubble":
            calls = model.kind_of_call if self.plan.puts_off(self.number, worker) else ()
            held = _add_split_backward(model, calls, micro, held)
        least = self._looked_up * DTYPE_BYTES[worker.compute_dtype]
        backward = dict(held.backward)
        backward["working set"] = max(backward["working set"], least)
        return replace(held, backward=backward)

    def before_s(self) -> float:
        """Return the seconds of the gathers done once, before any computation."""
        return self.links.gather_s[ROOT] + self.links.gather_s[BEFORE]

    def after_s(self, *, overlapped: bool) -> float:
        """Return the seconds of the reductions after the last backward.

        Args:
            overlapped: unit buckets are already reduced concurrently with it.
        """
        reduce_s, buckets = self.links.reduce_s, self.links.buckets
        ends = reduce_s[ROOT] + reduce_s[BEFORE]
        return ends if overlapped else ends + sum(reduce_s[name] for name in buckets.kinds)

    def update_s(self, worker: int) -> float:
        one, plan = self.workers[worker], self.plan
        zero_stage, gathered = plan.zero_stage, plan.communication_dtype
        whole = compute_optimizer_seconds(
            self.profile, one.device_class, zero_stage, one.state_on, gathered=gathered
        )
        return whole * (one.state_share if zero_stage else 1.0)

    def _state(self, worker: Worker) -> StateModel:
        return self.memory.state(self.profile.model_of(worker.device_class), worker.state_on)

    @cached_property
    def _owned(self) -> tuple[OwnedState, ...]:
        shares = tuple(worker.state_share for worker in self.workers)
        return compute_owned_by_rank_buckets(
            [self._state(worker).buckets for worker in self.workers],
            shares,
            self.plan.cut_multiple,
        )

    @cached_property
    def state(self) -> list[dict[str, int]]:
        """State and collective buffers of each worker, in bytes by cause."""
        found = []
        for worker, own in zip(self.workers, self._owned):
            state = self._state(worker)
            causes = {"state": state.owned_bytes(own)} | state.fixed_bytes_by_cause
            causes["gradients"] += state.received_bytes(dict(own.elements), own.ranks)
            found.append(causes)
        return found

    def make_storage_key(self, worker: int) -> Hashable:
        """Return a key: equal for workers of a kind storing and updating as much."""
        one = self.workers[worker]
        return self.kind_of[worker], one.state_on, one.state_share, self._owned[worker]

    def host_bytes(self, worker: int) -> int:
        state = self._state(self.workers[worker])
        return state.owned_bytes_on_host(self._owned[worker])


def _one(seconds: FloatArray) -> float:
    """Return the seconds of the only worker."""
    return float(seconds[0])


def make_layered(mode: Mode) -> Mode:
    """Return the mode with layered order, in which a stage's passes run."""
    return mode if mode.order == "layered" else mode.model_copy(update={"order": "layered"})


def _find_pass_peaks(held: Activations) -> PassBytes:
    """Return the peaks over the phases of a pass."""
    most: dict[Pass, dict[str, int]] = {"forward": {}, "head": {}, "backward": {}}
    left = 0
    for phase in held.phases:
        causes = {name: int(np.max(value)) for name, value in held.by_cause(phase).items()}
        left = max(left, causes["activations"])
        most[phase.computation[1]] = select_larger(most[phase.computation[1]], causes)
    return PassBytes(left, 0, most["forward"], most["head"], most["backward"])


def _add_split_backward(
    model: ModelProfile, calls: Sequence[str], micro: MicroBatches, held: PassBytes
) -> PassBytes:
    """Return the bytes with a split backward of calls of these kinds, or with a deferred full
    backward where no input comes before."""
    split, working = _of_all(micro, model.root.kept), 0
    for kind in map(model.kind, calls):
        split += _of_all(micro, kind.split)
        left, in_parts, saved, whole = (
            0 if curve is None else int(micro.largest_bytes(curve)[0])
            for curve in (kind.split, kind.split_backward, kind.saved, kind.saved_backward)
        )
        working = max(working, in_parts, saved + whole - left)
    last = held.backward | {"activations": split, "working set": working}
    return replace(held, split=split, backward=select_larger(held.backward, last))


def _of_all(micro: MicroBatches, curve: Curve | None) -> int:
    """Return the bytes of all micro-batches."""
    return 0 if curve is None else int(micro.bytes(curve)[0])


def select_larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return the mapping of bytes by cause with the larger total."""
    return other if sum(other.values()) >= sum(one.values()) else one
