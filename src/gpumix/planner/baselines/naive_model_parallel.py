"""Naive model parallelism: layers in the order of devices, as many on each as memory allows.

For jobs that only need the model to fit: one device per stage, nothing sharded, the batch as one
micro-batch, or as few as fit. With one micro-batch, one device computes at a time; with more,
passes overlap as in any pipeline. Unlike in other strategies, micro-batches may be larger than
measured: times and bytes are extrapolated in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

import numpy as np

from gpumix.cost.memory_layout.curves import FloatArray, IntArray, interpolate_bytes
from gpumix.cost.peak_memory import compute_free_bytes, get_element_bytes
from gpumix.cost.predict import predict
from gpumix.planner.common.policy_shortage import NearestMiss
from gpumix.planner.common.stage_preconditions import (
    SINGLE_DEVICE_TECHNIQUES,
    check_space_includes,
    refuse_one_stage,
)
from gpumix.planner.common.strategy import (
    PlanRequest,
    get_prediction,
    is_within_memory,
    list_devices_by_rank,
)
from gpumix.planner.pipeline_parallel.candidate import Cut, UncutCandidate, build_staged_plan
from gpumix.planner.pipeline_parallel.stage_memory import StageMemory
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    StageModes,
    get_group_kind,
)
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile


def plan_naive_model_parallel(profile: Profile, request: PlanRequest) -> Plan:
    """Plan one stage per device, filled alike, with the largest micro-batch that fits, without
    recompute if possible. With more devices than possible stages, use the devices with the most
    memory.

    Raises:
        InputError: the request names devices unknown to the profile, there is only one device or
            one unit, there are more devices than unit calls or stages and none may be left out, the
            techniques exclude such a plan, or the profile does not say what units need of each
            other.
        NoFeasiblePlanError: the devices cannot hold the model and one sample, or the techniques
            asked for were not measured on them.
    """
    devices = list_devices_by_rank(profile, request)
    refuse_one_stage(profile, devices)
    check_space_includes(request.space, SINGLE_DEVICE_TECHNIQUES)
    devices = _select_largest_devices(profile, request, devices)
    manners = StageModes({NO_TENSOR_PARALLEL: profile}, request.space)
    if lacking := manners.find_refusal({device.device_class for device in devices}, "1f1b"):
        raise NoFeasiblePlanError(
            f"no plan has a stage for each device: {lacking.why}",
            code="no-stage-per-device",
            fix=lacking.fix,
        )
    misses = NearestMiss("the model, layer by layer,")
    for way in _iterate_candidates(manners, request.global_batch, devices):
        plan = _plan(profile, request.global_batch, way)
        if is_within_memory(get_prediction(plan).workers):
            return plan
        misses.note(plan, get_prediction(plan).workers)
    raise misses.error(profile)


def _select_largest_devices(
    profile: Profile, request: PlanRequest, devices: tuple[Device, ...]
) -> tuple[Device, ...]:
    """Return at most as many devices as possible stages, in rank order."""
    most = min(profile.model.most_stages, request.space.max_pipeline_stages or len(devices))
    if len(devices) <= most:
        return devices
    if request.space.leave_out is False:
        raise InputError(
            f"{len(devices)} devices of a stage each need as many units and stages, there are "
            f"{most} at most",
            code="too-few-units",
            fix="use fewer devices, or `strategy: staged`, which puts several devices in a stage",
        )
    by_room = sorted(devices, key=lambda d: -compute_free_bytes(profile, d.device_class))
    kept = set(by_room[:most])
    return tuple(device for device in devices if device in kept)


def _iterate_candidates(
    manners: StageModes, batch: int, devices: tuple[Device, ...]
) -> Iterator[UncutCandidate]:
    """Yield ways by falling micro-batch size, each first without recompute if all devices can."""
    row = tuple((device,) for device in devices)
    every = [manners.of(get_group_kind(group), "1f1b", last=group is row[-1]) for group in row]
    size = batch
    while size:
        for again in (False, True):
            alike = [[one for one in some if one.mode.recompute is again] for some in every]
            if all(alike):
                yield UncutCandidate(row, tuple(some[0] for some in alike), "1f1b", size)
        size //= 2


def _plan(profile: Profile, batch: int, way: UncutCandidate) -> Plan:
    count = ceil(batch / way.micro_batch)
    cut = _cut_by_memory(profile, way, count)
    plan = build_staged_plan(profile, batch, way, cut, ((count,),) * len(way.row), strategy="model")
    return plan.model_copy(update={"prediction": predict(profile, plan)})


def _cut_by_memory(profile: Profile, way: UncutCandidate, count: int) -> Cut:
    """Return the cut that fills the fullest device least."""
    edges = np.array([0, *profile.model.cuts, len(profile.model.calls)])
    room = StageMemory(profile)

    def filled(stage: int, begin: IntArray, end: IntArray) -> FloatArray:
        (device,) = way.row[stage]
        name = device.device_class
        each, _ = get_element_bytes(profile, name, zero_stage=0)
        left = _sum_kept_bytes(profile, way, stage) * min(count, len(way.row) - stage)
        part = room.elements(begin, end) * each + left[end] - left[begin]
        return np.asarray(part / max(1, compute_free_bytes(profile, name)))

    return tuple(_minimize_largest_stage(edges, len(way.row), filled))


def _sum_kept_bytes(profile: Profile, way: UncutCandidate, stage: int) -> FloatArray:
    """Return the bytes left by a micro-batch at all calls before each, on a stage's device."""
    model, mode = profile.model_of(way.row[stage][0].device_class), way.manners[stage].mode
    kinds = map(model.kind, model.kind_of_call)
    left = (kind.kept if mode.recompute else kind.saved or kind.kept for kind in kinds)
    return np.cumsum([0.0, *(float(interpolate_bytes(curve, way.micro_batch)) for curve in left)])


def _minimize_largest_stage(
    edges: IntArray, stages: int, cost: Callable[[int, IntArray, IntArray], FloatArray]
) -> list[int]:
    """Return the ends of all stages minimizing the costliest stage, by dynamic programming.

    Args:
        edges: numbers of the calls that a stage may begin with or end before.
        cost: of a stage with calls [begin, end), vectorized.
    """
    begin, end = np.triu_indices(len(edges), k=1)
    best = np.full(len(edges), np.inf)
    best[0] = 0.0
    chosen = []
    for stage in range(stages):
        of_stage = np.full((len(edges), len(edges)), np.inf)
        of_stage[begin, end] = cost(stage, edges[begin], edges[end])
        most = np.maximum(best[:, None], of_stage)
        chosen.append(most.argmin(axis=0))
        best = most.min(axis=0)
    ends, at = [], len(edges) - 1
    for places in reversed(chosen):
        ends.append(int(edges[at]))
        at = int(places[at])
    return ends[::-1]
