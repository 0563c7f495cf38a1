"""Prediction of a plan's step time and memory: the cost model applied to a whole plan.

The planner, the simulator, the memory check and the report all use this module. Time follows the
formula in `cost.step_time`, memory the phases in `cost.memory_layout.activation_phases`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gpumix.cost.flops import add_flops
from gpumix.cost.input_time import compute_input_seconds, limit_to_input_rate
from gpumix.cost.loading_memory import compute_loading_bytes
from gpumix.cost.memory_layout.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.model_match import check_units
from gpumix.cost.network.buckets import BucketGrouping
from gpumix.cost.network.collective_times import (
    BufferCuts,
    CollectiveSeconds,
    ShardedLayout,
    compute_collective_seconds,
    make_free_collectives,
)
from gpumix.cost.network.link_times import LinkModel, build_link_model, count_devices_by_host
from gpumix.cost.peak_memory import (
    Activations,
    MemoryModel,
    OwnedState,
    compute_owned_by_rank_buckets,
    compute_owned_state,
    compute_usable_bytes,
)
from gpumix.cost.pipeline.staged_step import StagedStep, predict_stages
from gpumix.cost.step_time import (
    can_keep_state_on_host,
    can_predict_mode,
    compute_exposed_seconds,
    compute_exposed_wave_seconds,
    compute_optimizer_seconds,
    compute_pass_seconds,
    needs_sync_between_passes,
)
from gpumix.cost.tensor_parallel_groups import (
    TensorParallelGroup,
    expand_to_members,
    reduce_to_leaders,
    refuse_unmeasured,
)
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.stage import Mode, Place, Worker
from gpumix.schema.profile.profile import ModelProfile, Profile


def predict(profile: Profile, plan: Plan) -> Prediction:
    """Predict one step of `plan` with `cost.step_time` and `cost.peak_memory`.

    `exposed_communication_s` is the reduction of the step time if collectives took no time.

    Raises:
        InputError: the profile is of another model, sequence length or precision, or lacks a class,
            a mode or a collective form of the plan.
    """
    check_plan_matches_profile(profile, plan)
    if len(plan.stages) > 1:
        found = predict_stages(profile, plan)
    else:
        found = _Step(*reduce_to_leaders(profile, plan)).prediction()
    found = expand_to_members(profile, plan, found) if plan.uses_tensor_parallel else found
    found = found.model_copy(update={"loading_bytes": compute_loading_bytes(profile.model)})
    return add_flops(profile, plan, limit_to_input_rate(profile, plan, found))


def predict_step_seconds(profile: Profile, plan: Plan) -> float:
    """Return only the step time of `predict`.

    Raises:
        InputError: see `predict`.
    """
    check_plan_matches_profile(profile, plan)
    input_s = compute_input_seconds(profile, plan)
    if len(plan.stages) > 1:
        return max(input_s, StagedStep(profile, plan).seconds)
    return max(input_s, _Step(*reduce_to_leaders(profile, plan)).seconds)


def predict_joined_seconds(profile: Profile, plan: Plan, numbers: Iterable[int]) -> list[float]:
    """Return the step times of a plan of one stage with so many units in a bucket, for each of
    `numbers`.

    Raises:
        InputError: see `predict`.
    """
    check_plan_matches_profile(profile, plan)
    step, input_s = _Step(*reduce_to_leaders(profile, plan)), compute_input_seconds(profile, plan)
    return [max(input_s, step.joined_seconds(number)) for number in numbers]


@dataclass(frozen=True)
class _EqualWorkers:
    """Workers of one class and one mode."""

    device_class: str
    mode: Mode
    ranks: list[int]
    micro: MicroBatches
    kept_graphs: IntArray


# Mode, whether some graphs are kept although the mode recomputes, identity of the rank's model, and
# place of the state.
_MemoryKey = tuple[Mode, bool, int, Place]


class _Step:
    """Step of a plan. Equal workers are counted once, however many there are."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile = profile
        self._plan = plan
        self._workers = plan.workers
        self._layout, self._wire = _lay_out(profile, plan)
        self._links = compute_collective_seconds(profile, self._wire, self._layout)
        ranks = len(get_sharding_group_shares(plan))
        self._memory = MemoryModel(profile, self._links, ranks, plan.zero_stage)

    @cached_property
    def seconds(self) -> float:
        return self._seconds_over(self._links)

    def joined_seconds(self, number: int) -> float:
        """Return the seconds of a step with `number` units in a bucket."""
        joining = replace(self._layout.joining, joined=number)
        layout = replace(self._layout, joining=joining)
        links = compute_collective_seconds(self._profile, self._wire, layout)
        return self._seconds_over(links)

    def _seconds_over(self, links: CollectiveSeconds) -> float:
        slowest = self._longest(self._waves(links)) + float(self._update_s.max())
        later = (self._plan.waves - 1) * compute_exposed_wave_seconds(self._in_later_waves(links))
        return slowest + compute_exposed_seconds(self._profile, links) + later

    def _waves(self, links: CollectiveSeconds) -> list[tuple[FloatArray, FloatArray]]:
        """Return the forward and backward seconds of each worker, by rank, in each wave."""
        numbers, later = range(1, self._plan.waves), self._in_later_waves(links)
        return [self._passes(links, 0), *(self._passes(later, number) for number in numbers)]

    def _in_later_waves(self, links: CollectiveSeconds) -> CollectiveSeconds:
        """Return the collectives of waves but the first: below stage 3 parameters stay gathered."""
        return links if self._plan.zero_stage == 3 else links.without_gathers()

    @cached_property
    def _update_s(self) -> FloatArray:
        return np.asarray(predict_update_seconds(self._profile, self._plan))

    def prediction(self) -> Prediction:
        plan, workers, step, update = self._plan, self._workers, self.seconds, self._update_s
        waves = free_waves = self._waves(self._links)
        if not self._links.is_free:
            free_waves = self._waves(make_free_collectives(self._links.buckets))
        forward, backward = (np.sum(passes, axis=0) for passes in zip(*waves))
        free_forward, free_backward = (np.sum(passes, axis=0) for passes in zip(*free_waves))
        hidden = self._longest(free_waves) + float(update.max())
        busy = free_forward + free_backward + update
        peaks, host = self._peaks()
        limits = {c.name: compute_usable_bytes(c) for c in self._profile.cluster.classes}
        tokens = plan.global_batch * plan.sequence_length
        return Prediction(
            step_s=step,
            tokens_per_s=tokens / step if step > 0 else float("inf"),
            exposed_communication_s=max(0.0, step - hidden - self._profile.step_overhead_s),
            workers=tuple(
                WorkerPrediction.model_construct(  # without validation: there may be very many
                    device=worker.device,
                    forward_s=float(forward[rank]),
                    backward_s=float(backward[rank]),
                    optimizer_s=float(update[rank]),
                    busy_s=float(busy[rank]),
                    memory_bytes=peaks[rank],
                    memory_limit_bytes=limits[worker.device_class],
                    host_bytes=host[rank],
                )
                for rank, worker in enumerate(workers)
            ),
        )

    def _longest(self, waves: list[tuple[FloatArray, FloatArray]]) -> float:
        if needs_sync_between_passes(self._plan.zero_stage):
            return sum(float(forward.max()) + float(backward.max()) for forward, backward in waves)
        return max(float((forward + backward).max()) for forward, backward in waves)

    def _passes(self, links: CollectiveSeconds, wave: int) -> tuple[FloatArray, FloatArray]:
        """Return the forward and backward seconds of each worker, by rank, in a wave."""
        forward, backward = np.zeros(len(self._workers)), np.zeros(len(self._workers))
        for alike in self._alike[wave]:
            forward[alike.ranks], backward[alike.ranks] = compute_pass_seconds(
                self._profile,
                alike.device_class,
                links,
                alike.micro,
                alike.mode,
                alike.kept_graphs,
            )
        return forward, backward

    def _peaks(self) -> tuple[list[dict[str, int]], list[int]]:
        """Return the peak of each worker by cause, exact for the plan's cuts, and its bytes on the
        host."""
        owned = self._owned()
        same: dict[_MemoryKey, dict[tuple[int, int, int, OwnedState], list[int]]] = {}
        models: dict[int, ModelProfile] = {}
        for rank, worker in enumerate(self._workers):
            kept = worker.kept_graphs
            most = max(self._samples_in(worker, wave) for wave in range(self._plan.waves))
            case = (most, worker.micro_batch, kept, owned[rank])
            model = self._profile.model_of(worker.device_class)
            models[id(model)] = model
            holding = (worker.mode, kept > 0, id(model), worker.state_on)
            same.setdefault(holding, {}).setdefault(case, []).append(rank)
        peaks: list[dict[str, int]] = [{}] * len(self._workers)
        host = [0] * len(self._workers)
        framework = {c.device_class: c.framework_bytes for c in self._profile.classes}
        for (mode, _, key, state_on), alike in same.items():
            samples, sizes, graphs, stored = zip(*alike)
            micro = MicroBatches.of(samples, sizes)
            held = Activations(models[key], micro, mode, np.asarray(graphs))
            found = self._memory.peaks(held, stored, state_on=state_on)
            for ranks, own, peak, on_host in zip(alike.values(), stored, found, held.on_host):
                causes = {name: peak | {"framework": size} for name, size in framework.items()}
                state_there = self._memory.state(models[key], state_on).owned_bytes_on_host(own)
                for rank in ranks:
                    peaks[rank] = causes[self._workers[rank].device_class]
                    host[rank] = int(on_host) + state_there
        return peaks, host

    def _owned(self) -> list[OwnedState]:
        multiple = self._plan.cut_multiple
        if self._plan.sharding == "all":
            models = (self._profile.model_of(worker.device_class) for worker in self._workers)
            buckets = [self._memory.state(model).buckets for model in models]
            shares = tuple(worker.state_share for worker in self._workers)
            return list(compute_owned_by_rank_buckets(buckets, shares, multiple))
        owned: dict[int, OwnedState] = {}
        known: dict[tuple[float, ...], tuple[OwnedState, ...]] = {}
        for ranks in group_ranks_by_host(self._workers).values():
            shares = tuple(self._workers[rank].state_share for rank in ranks)
            if shares not in known:
                known[shares] = compute_owned_state(self._links.buckets, shares, multiple)
            owned |= dict(zip(ranks, known[shares]))
        return [owned[rank] for rank in range(len(self._workers))]

    def _samples_in(self, worker: Worker, wave: int) -> int:
        """Return the samples of a worker in a wave."""
        if self._plan.waves == 1:
            return worker.samples
        return sum(worker.divide_micro_batches(self._plan.waves)[wave])

    @cached_property
    def _alike(self) -> list[list[_EqualWorkers]]:
        """Equal workers in each wave."""
        return [self._group_alike(wave) for wave in range(self._plan.waves)]

    def _group_alike(self, wave: int) -> list[_EqualWorkers]:
        found = []
        for (name, mode), ranks in self._grouped_workers.items():
            workers = [self._workers[rank] for rank in ranks]
            samples = [self._samples_in(worker, wave) for worker in workers]
            sizes = [self._workers[rank].micro_batch for rank in ranks]
            kept = np.asarray([self._workers[rank].kept_graphs for rank in ranks])
            micro = MicroBatches.of(samples, sizes)
            found.append(_EqualWorkers(name, mode, ranks, micro, kept))
        return found

    @cached_property
    def _grouped_workers(self) -> dict[tuple[str, Mode], list[int]]:
        groups: dict[tuple[str, Mode], list[int]] = {}
        for rank, worker in enumerate(self._workers):
            groups.setdefault((worker.device_class, worker.mode), []).append(rank)
        return groups


def compute_plan_collectives(profile: Profile, plan: Plan) -> CollectiveSeconds:
    """Return the seconds of each collective of `plan`.

    Raises:
        InputError: nothing is known of a collective form of the plan, or of a link.
    """
    layout, wire = _lay_out(profile, plan)
    return compute_collective_seconds(profile, wire, layout)


def _lay_out(profile: Profile, plan: Plan) -> tuple[ShardedLayout, LinkModel]:
    """Return the layout of a plan's state, and the links between its devices."""
    shares = group_shares_by_host(plan)
    layout = ShardedLayout(
        plan.zero_stage,
        plan.sharding,
        plan.collectives,
        BufferCuts.at(get_sharding_group_shares(plan), plan.cut_multiple),
        plan.communication_dtype,
        BucketGrouping.of(profile.model, plan),
        hosts=len(shares),
        alike=len(set(shares)) == 1,
        parameters_on=plan.parameters_on,
        classes=tuple(sorted({w.device_class for w in plan.workers})),
    )
    on_host = count_devices_by_host((w.host, w.device_class) for w in plan.workers)
    return layout, build_link_model(profile, on_host)


def predict_update_seconds(profile: Profile, plan: Plan) -> list[float]:
    """Return the seconds of each worker's optimizer update; at stage 0 each updates everything."""
    stage, gathered = plan.zero_stage, plan.communication_dtype
    kinds = {(w.device_class, w.state_on) for w in plan.workers}
    whole = {
        (name, on): compute_optimizer_seconds(
            profile, name, stage, on, gathered=gathered, parameters_on=plan.parameters_on
        )
        for name, on in kinds
    }
    return [
        whole[w.device_class, w.state_on] * (w.state_share if stage else 1.0) for w in plan.workers
    ]


def group_ranks_by_host(workers: tuple[Worker, ...]) -> dict[str, list[int]]:
    """Return the ranks on each host."""
    found: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        found.setdefault(worker.host, []).append(rank)
    return found


def group_shares_by_host(plan: Plan) -> list[tuple[float, ...]]:
    """Return the shares of the ranks of each host."""
    workers = plan.workers
    return [
        tuple(workers[rank].state_share for rank in ranks)
        for ranks in group_ranks_by_host(workers).values()
    ]


def get_sharding_group_shares(plan: Plan) -> tuple[float, ...]:
    """Return the shares of the ranks dividing the state; of several hosts, the least even shares,
    because all hosts wait for them."""
    if plan.sharding == "all":
        return plan.stages[0].shares
    return max(
        group_shares_by_host(plan), key=lambda shares: (max(shares) * len(shares), len(shares))
    )


def check_plan_matches_profile(profile: Profile, plan: Plan) -> None:
    """Refuse a plan made for something else.

    Raises:
        InputError: model, sequence length, precision or device classes differ.
    """
    for what, planned, profiled in (
        ("model", plan.model, profile.model.fingerprint),
        ("sequence length", plan.sequence_length, profile.sequence_length),
    ):
        if planned != profiled:
            raise InputError(
                f"the plan's {what} is {planned}, the profile's is {profiled}",
                code="plan-profile-mismatch",
                fix="give the profile that the plan was made from, or plan again from this one",
            )
    check_units(plan, profile.model)
    _check_classes(profile, plan)
    _check_tp_groups(profile, plan)


def _check_classes(profile: Profile, plan: Plan) -> None:
    measured = {c.device_class: c.compute_dtype for c in profile.classes}
    for name, mode, dtype, state_on in sorted(
        {(w.device_class, w.mode, w.compute_dtype, w.state_on) for w in plan.workers}, key=repr
    ):
        if name not in measured:
            raise InputError(
                f"the profile knows nothing of device class '{name}'",
                code="profile-class-missing",
                fix="profile again on this cluster: `gpumix profile JOB.yaml`",
            )
        if dtype != measured[name]:
            raise InputError(
                f"the plan's precision is {dtype}, the profile's is {measured[name]}",
                code="plan-profile-precision",
                where=f"device class '{name}'",
                fix="give the profile that the plan was made from, or plan again from this one",
            )
        unknown = "" if can_predict_mode(profile, name, mode) else f"to {mode.describe()}"
        if state_on == "host" and not can_keep_state_on_host(profile, name):
            unknown = unknown or "to keep state on the host"
        if unknown:
            raise InputError(
                f"the profile does not say what class '{name}' takes {unknown}",
                code="profile-mode-missing",
                fix="profile again on this cluster: `gpumix profile JOB.yaml`",
            )


def _check_tp_groups(profile: Profile, plan: Plan) -> None:
    """Refuse unmeasured tensor-parallel groups. A group counts as its first worker, over links
    inside one host: see `cost.tensor_parallel_groups`."""
    for tp_group in (g for stage in plan.stages if stage.tensor > 1 for g in stage.tp_groups):
        if len({(worker.host, worker.device_class) for worker in tp_group}) > 1:
            raise InputError(
                "a tensor-parallel group of several hosts or device classes was not measured",
                code="tensor-parallel-across-classes",
                where=f"the group of {', '.join(worker.device for worker in tp_group)}",
                fix="form groups of devices of one class on one host, or train this plan as it is, "
                "with nothing foretold: gpumix train JOB.yaml --plan PLAN.json",
            )
    for stage in plan.stages:
        kinds = {(w.device_class, stage.get_tp_size(w), w.mode) for w in stage.leaders}
        for name, size, mode in sorted(kinds, key=repr):
            if size > 1:
                refuse_unmeasured(
                    profile, TensorParallelGroup(name, size), mode, sequence=stage.sequence
                )
