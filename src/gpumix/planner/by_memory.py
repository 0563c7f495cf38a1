"""Naive model parallelism: layers in the order of devices, as many each as its memory bears.

For those who want a model to fit and nothing else: one device a stage, nothing divided, the batch
as one micro-batch, or as few as find room. With one micro-batch one device computes at a time;
where it takes more of them, their passes overlap as in any pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Literal

import numpy as np

from gpumix.cost.curves import FloatArray, IntArray, bytes_at
from gpumix.cost.memory import element_bytes, free_bytes
from gpumix.cost.predict import predict
from gpumix.cost.time import can
from gpumix.planner.base import PlanRequest, fit, predicted, ranked_devices
from gpumix.planner.manner import ALONE, Manner
from gpumix.planner.misfit import Misses
from gpumix.planner.staged import refuse_one_stage
from gpumix.planner.way import Cut, Way, assemble_stages
from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Mode, Plan
from gpumix.spec.profile import Profile


def by_memory(profile: Profile, request: PlanRequest) -> Plan:
    """One stage a device, filled alike: of micro-batches the largest that fits, without recompute
    if there is room.

    Raises:
        InputError: the request names devices that the profile does not know, there is one device
            or one unit alone, there are more devices than unit calls, or the profile does not say
            what units need of each other.
        NoFeasiblePlanError: the devices cannot hold the model and one sample.
    """
    devices = ranked_devices(profile, request)
    refuse_one_stage(profile, devices)
    if len(devices) > (calls := len(profile.model.calls)):
        raise InputError(
            f"{len(devices)} devices of a stage each need as many units, the model calls {calls}",
            fix="use fewer devices, or `strategy: staged`, which puts several in a stage",
        )
    misses = Misses("the model, layer by layer,")
    for way in _ways(profile, request, devices):
        plan = _plan(profile, request.global_batch, way)
        if fit(predicted(plan).workers):
            return plan
        misses.note(plan, predicted(plan).workers)
    raise misses.error(profile)


def _ways(profile: Profile, request: PlanRequest, devices: tuple[Device, ...]) -> Iterator[Way]:
    row = tuple((device,) for device in devices)
    names = {device.device_class for device in devices}
    keep = False in request.space.recompute
    keep = keep and all(can(profile, name, Mode(recompute=False)) for name in names)
    head: Literal["whole", "chunked"] = "chunked" if "whole" not in request.space.heads else "whole"
    limits = [profile.of_class(name).largest_micro_batch for name in names]
    size = min([request.global_batch, *(limit for limit in limits if limit is not None)])
    while size:
        for recompute in (False, True):
            if recompute in request.space.recompute and (recompute or keep):
                mode = Mode(recompute=recompute, head=head)
                yield Way(row, (Manner(ALONE, mode),) * len(row), "1f1b", size)
        size //= 2


def _plan(profile: Profile, batch: int, way: Way) -> Plan:
    count = ceil(batch / way.micro_batch)
    cut = _filled_alike(profile, way, count)
    plan = assemble_stages(profile, batch, way, cut, ((count,),) * len(way.row), strategy="model")
    return plan.model_copy(update={"prediction": predict(profile, plan)})


def _filled_alike(profile: Profile, way: Way, count: int) -> Cut:
    """The cut at which the fullest device is least full."""
    calls, stages = len(profile.model.calls), len(way.row)

    def filled(stage: int, begin: IntArray, end: IntArray) -> FloatArray:
        (device,) = way.row[stage]
        held = _bytes_before(profile, way, device, min(count, stages - stage))
        part = (held[end] - held[begin]) + _ends(profile, device, begin == 0, end == calls)
        return np.asarray(part / max(1, free_bytes(profile, device.device_class)))

    return (*_least_most(calls, stages, filled), calls)


def _bytes_before(profile: Profile, way: Way, device: Device, in_flight: int) -> FloatArray:
    """What all calls before each hold: their state, and what so many micro-batches leave there."""
    model = profile.model_of(device.device_class)
    each, seen = [], set()
    for name, of_call in zip(model.calls, model.kind_of_call):
        kind = model.kind(of_call)
        left = kind.kept if way.manners[0].mode.recompute else kind.saved or kind.kept
        state = 0 if name in seen else kind.trainable * _per_element(profile, device)
        each.append(state + in_flight * float(bytes_at(left, way.micro_batch)))
        seen.add(name)
    return np.concatenate([[0.0], np.cumsum(each)])


def _ends(profile: Profile, device: Device, first: FloatArray, last: FloatArray) -> FloatArray:
    """State of what the first stage, and the last one, have of the root."""
    model = profile.model
    elements = {p.name: p.trainable for p in model.root.parameters}
    sizes = [
        sum(elements[name] for name in needs.root) for needs in (model.needs[0], model.needs[-1])
    ]
    of_root = np.where(first, sizes[0], 0) + np.where(last, sizes[1], 0)
    return np.asarray(of_root * _per_element(profile, device))


def _per_element(profile: Profile, device: Device) -> float:
    return element_bytes(profile, device.device_class, zero_stage=0)[0]


def _least_most(
    calls: int, stages: int, cost: Callable[[int, IntArray, IntArray], FloatArray]
) -> list[int]:
    """The ends of all stages but the last, where the costliest costs least: by dynamic programme.

    Args:
        cost: of a stage that has calls [begin, end), for many of these at once.
    """
    begin, end = np.triu_indices(calls + 1, k=1)
    best = np.full(calls + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for stage in range(stages):
        of_stage = np.full((calls + 1, calls + 1), np.inf)
        of_stage[begin, end] = cost(stage, begin, end)
        most = np.maximum(best[:, None], of_stage)
        chosen.append(most.argmin(axis=0))
        best = most.min(axis=0)
    cut, at = [], calls
    for places in reversed(chosen[1:]):
        at = int(places[at])
        cut.append(at)
    return cut[::-1]
