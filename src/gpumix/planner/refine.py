"""Last touches on the fastest plan, too costly for a search over all plans.

The cost model judges each touch, and only a touch that fits and does not lengthen the step is kept:

1. Of plans for the same devices within one part in a thousand of the fastest, the lowest ZeRO stage
   wins: it has fewer collectives, so less depends on the model of their time.
2. Units are joined: fewer and larger collectives, at more memory for each.
3. Workers that recompute keep as many graphs as fit into the memory left, and samples move to those
   that got faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from gpumix.cost.memory_layout.curves import IntArray, MicroBatches
from gpumix.cost.peak_memory import Activations
from gpumix.cost.predict import (
    compute_plan_collectives,
    predict,
    predict_joined_seconds,
    predict_step_seconds,
)
from gpumix.cost.step_time import can_predict_mode, compute_pass_seconds
from gpumix.planner.common.strategy import (
    PlanRequest,
    attach_bound,
    get_prediction,
    is_within_memory,
)
from gpumix.planner.data_parallel.class_options import TimeBounds
from gpumix.planner.data_parallel.search import plan_one_stage_below
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode, Stage, Worker
from gpumix.schema.profile.profile import Profile

EQUAL_SPEED_FRACTION = 1e-3
UNITS_PER_BUCKET = (2, 3, 4, 6, 8)
MIN_RELATIVE_GAIN = 1e-9  # a smaller relative gain is none
MOST_MOVES, FEW_WORKERS = 16, 64
MANY_GRAPHS = 512  # beyond, only so many numbers are tried


def refine_plan(
    profile: Profile,
    request: PlanRequest,
    plan: Plan,
    paces: TimeBounds,
    below_s: float = float("inf"),
) -> Plan:
    """Apply the last touches, keeping the bound. A lower ZeRO stage, which shortens no step, is
    tried only if the rest gets below `below_s`; if nothing can, the plan is returned as it is."""
    if _least_seconds(profile, plan) >= below_s:
        return plan
    touched = _join_and_keep_graphs(profile, request, plan, below_s)
    if get_prediction(touched).step_s >= below_s:
        return touched
    lower = _lower_zero_stage(profile, request, plan, paces)
    return touched if lower is plan else _join_and_keep_graphs(profile, request, lower)


def _least_seconds(profile: Profile, plan: Plan) -> float:
    """Return seconds that touches cannot get below: joined units hide collectives at most, and a
    kept graph saves a forward pass."""
    expected = get_prediction(plan)
    may_keep = cache(partial(_may_keep, profile))
    saved = (
        one.forward_s
        for worker, one in zip(plan.workers, expected.workers)
        if worker.samples and may_keep(worker.device_class, worker.mode)
    )
    return expected.step_s - expected.exposed_communication_s - max(saved, default=0.0)


def _join_and_keep_graphs(
    profile: Profile, request: PlanRequest, plan: Plan, below_s: float = float("inf")
) -> Plan:
    plan = join_units(profile, plan)
    if set(request.space.gradient_checkpointing) == {True, False}:
        kept = _keep_graphs(profile, plan, below_s)
        plan = plan if kept is plan else _move_samples(profile, kept)
    return plan


def _lower_zero_stage(
    profile: Profile, request: PlanRequest, plan: Plan, paces: TimeBounds
) -> Plan:
    if plan.parameters_on == "host":
        return plan
    below_s = get_prediction(plan).step_s * (1.0 + EQUAL_SPEED_FRACTION)
    places = tuple({worker.state_on for worker in plan.workers})
    devices = tuple(worker.device for worker in plan.workers)
    for zero_stage in sorted(z for z in set(request.space.zero_stages) if z < plan.zero_stage):
        update = {
            "zero_stages": (zero_stage,),
            "state_on": places,
            "parameters_on": ("device",),
            "leave_out": False,
        }
        space = request.space.model_copy(update=update)
        lower = request.model_copy(update={"space": space, "devices": devices})
        found = plan_one_stage_below(profile, lower, paces, below_s)
        if found is not None and get_prediction(found).step_s <= below_s:
            return attach_bound(found, get_prediction(plan).bound_s)
    return plan


def join_units(profile: Profile, plan: Plan, below_s: float = float("inf")) -> Plan:
    """Join as many units in a row as make the step shortest, if that may get below `below_s`."""
    expected = get_prediction(plan)
    exposed_s = expected.exposed_communication_s
    if not exposed_s or expected.step_s - exposed_s >= below_s:
        return plan
    stage, units = plan.stages[0], len(set(plan.stages[0].units))
    numbers = [number for number in UNITS_PER_BUCKET if number < 2 * units]
    seconds = dict(zip(numbers, predict_joined_seconds(profile, plan, numbers)))
    for number in sorted(numbers, key=lambda n: seconds[n]):
        if not seconds[number] < get_prediction(plan).step_s * (1.0 - MIN_RELATIVE_GAIN):
            break
        found = _with_stage(profile, plan, stage.model_copy(update={"joined": number}))
        if is_within_memory(get_prediction(found).workers):
            return found
    return plan


def _keep_graphs(profile: Profile, plan: Plan, below_s: float) -> Plan:
    """Keep as many graphs on each worker as fit and make the worker faster, if faster than
    `below_s` then."""
    alike: dict[tuple[str, int, int, Mode], list[int]] = {}
    may_keep = cache(partial(_may_keep, profile))
    for rank, w in enumerate(plan.workers):
        if w.samples and may_keep(w.device_class, w.mode):
            alike.setdefault((w.device_class, w.samples, w.micro_batch, w.mode), []).append(rank)
    workers, any_kept = list(plan.workers), False
    for ranks in alike.values():
        of_ranks = [get_prediction(plan).workers[rank] for rank in ranks]
        room = min(of.memory_limit_bytes - of.peak_bytes for of in of_ranks)
        kept = _most_graphs(profile, plan, workers[ranks[0]], room)
        for rank in ranks if kept != workers[ranks[0]].kept_graphs else ():
            workers[rank] = workers[rank].model_copy(update={"kept_graphs": kept})
            any_kept = True
    if not any_kept:
        return plan
    stage = plan.stages[0].model_copy(update={"workers": tuple(workers)})
    changed = plan.model_copy(update={"stages": (stage,), "prediction": None})
    if predict_step_seconds(profile, changed) >= below_s:
        return plan
    found = _with_stage(profile, plan, stage)
    return (
        found
        if is_within_memory(get_prediction(found).workers) and not _is_faster(plan, found)
        else plan
    )


def _move_samples(profile: Profile, plan: Plan) -> Plan:
    """Move one sample at a time from each of the busiest workers that are alike, while that makes
    the step shorter. Workers with activations on the host take none: room there is not looked
    at."""
    for _ in range(MOST_MOVES if len(plan.workers) <= FEW_WORKERS else 0):
        busy_s = [one.forward_s + one.backward_s for one in get_prediction(plan).workers]
        giver = busy_s.index(max(busy_s))
        if plan.workers[giver].samples < 2:
            break
        alike: dict[tuple[str, int, int, Mode, int], list[int]] = {}
        for rank, w in enumerate(plan.workers):
            key = (w.device_class, w.samples, w.micro_batch, w.mode, w.kept_graphs)
            alike.setdefault(key, []).append(rank)
        givers = next(ranks for ranks in alike.values() if giver in ranks)
        takers = [
            ranks
            for (_, samples, _, mode, _), ranks in alike.items()
            if busy_s[ranks[0]] < busy_s[giver] and samples and mode.boundary == "device"
        ]
        moved = [_move_samples_between(profile, plan, givers, ranks) for ranks in takers]
        fitting = [one for one in moved if is_within_memory(get_prediction(one).workers)]
        fastest = min(fitting, key=lambda one: get_prediction(one).step_s, default=plan)
        if not _is_faster(fastest, plan):
            break
        plan = fastest
    return plan


def _move_samples_between(
    profile: Profile, plan: Plan, givers: Sequence[int], takers: Sequence[int]
) -> Plan:
    """Move a sample from each giver, spread over the takers."""
    workers = list(plan.workers)
    each, rest = divmod(len(givers), len(takers))
    taken = [(rank, each + (place < rest)) for place, rank in enumerate(takers)]
    for rank, more in (*((rank, -1) for rank in givers), *taken):
        of = workers[rank]
        largest = profile.of_class(of.device_class).largest_micro_batch or of.samples + more
        whole = of.micro_batch == of.samples
        size = min(of.samples + more, largest if whole else of.micro_batch)
        most = len(profile.model.calls) * -(-(of.samples + more) // size)
        update = {
            "samples": of.samples + more,
            "micro_batch": size,
            "kept_graphs": min(of.kept_graphs, most),
        }
        workers[rank] = of.model_copy(update=update)
    stage = plan.stages[0].model_copy(update={"workers": tuple(workers)})
    return _with_stage(profile, plan, stage)


def _may_keep(profile: Profile, device_class: str, mode: Mode) -> bool:
    if mode.order == "sequential" or not mode.recompute:  # these have a mode keeping all graphs
        return False
    return can_predict_mode(profile, device_class, Mode(recompute=False, head=mode.head))


def _most_graphs(profile: Profile, plan: Plan, worker: Worker, room: int) -> int:
    """Return the fastest number of kept graphs within `room` bytes; on ties the fewest."""
    pairs = len(profile.model.calls) * len(worker.micro_batches)
    kept: IntArray = np.unique(np.linspace(0, pairs, min(pairs, MANY_GRAPHS) + 1).astype(np.int64))
    micro = MicroBatches.of(np.full(len(kept), worker.samples), worker.micro_batch)
    model = profile.model_of(worker.device_class)
    held = Activations(model, micro, worker.mode, kept).most
    links = compute_plan_collectives(profile, plan)
    seconds = sum(
        compute_pass_seconds(profile, worker.device_class, links, micro, worker.mode, kept),
        np.zeros(len(kept)),
    )
    fitting = np.where(held - held[0] <= room, seconds, np.inf)
    return int(kept[np.argmin(fitting)])


def _with_stage(profile: Profile, plan: Plan, stage: Stage) -> Plan:
    changed = plan.model_copy(update={"stages": (stage,), "prediction": None})
    changed = changed.model_copy(update={"prediction": predict(profile, changed)})
    return attach_bound(changed, get_prediction(plan).bound_s)


def _is_faster(one: Plan, other: Plan) -> bool:
    return get_prediction(one).step_s < get_prediction(other).step_s * (1.0 - MIN_RELATIVE_GAIN)
