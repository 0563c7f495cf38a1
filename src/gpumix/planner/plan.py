"""Plans with reasons: the alternatives, the gain from mixing, and the bottlenecks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Literal

from gpumix.cost.device_alone import compute_ideal_samples_per_s
from gpumix.cost.loading_memory import check_room_for_loading
from gpumix.cost.predict import predict_step_seconds
from gpumix.planner.baselines.best_subset import plan_best_subset
from gpumix.planner.baselines.cephalo import plan_cephalo
from gpumix.planner.baselines.even import plan_even
from gpumix.planner.baselines.naive_model_parallel import plan_naive_model_parallel
from gpumix.planner.baselines.poplar import plan_poplar
from gpumix.planner.baselines.whale import plan_proportional
from gpumix.planner.class_worth import ClassWorths
from gpumix.planner.common.stage_preconditions import refuse_least_stages
from gpumix.planner.common.strategy import (
    PlanRequest,
    Strategy,
    get_prediction,
    list_devices_by_rank,
)
from gpumix.planner.data_parallel.input_bound import account_for_input, slow_down_to_input
from gpumix.planner.data_parallel.search import compute_least_step_s
from gpumix.planner.optimal import FastestPlans, plan_fastest
from gpumix.planner.pipeline_parallel.stage_modes import get_measured_tp_degrees, list_tp_degrees
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.planner.undivided import plan_undivided
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.cluster.network import Link
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.dtypes import explain_compute_dtype, get_dtype_support
from gpumix.schema.plan.explanation import (
    EVEN_WITHOUT_PREFIX,
    SINGLE_CLASS_PREFIX,
    Bottlenecks,
    DtypeReason,
    MixingComparison,
    Reasons,
    RejectedPlan,
)
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import LARGEST_BATCH


def _check_loading(strategy: Strategy) -> Strategy:
    """Wrap a strategy, to refuse plans whose weights cannot be read."""

    def planned(profile: Profile, request: PlanRequest) -> Plan:
        found = strategy(profile, request)
        check_room_for_loading(profile, found)
        return found

    return planned


def _refuse_stage_choice(strategy: Strategy) -> Strategy:
    """Wrap a strategy with a fixed number of stages, to refuse `min_pipeline_stages`."""

    def planned(profile: Profile, request: PlanRequest) -> Plan:
        refuse_least_stages(request.space)
        return strategy(profile, request)

    return _check_loading(planned)


STRATEGIES: dict[str, Strategy] = {
    "optimal": account_for_input(plan_fastest),
    "staged": account_for_input(_check_loading(plan_staged)),
    "model": _refuse_stage_choice(plan_naive_model_parallel),
    "undivided": _refuse_stage_choice(plan_undivided),
    "even": _refuse_stage_choice(plan_even),
    "proportional": _refuse_stage_choice(plan_proportional),
    "poplar": _refuse_stage_choice(plan_poplar),
    "cephalo": _refuse_stage_choice(plan_cephalo),
    "best-subset": _refuse_stage_choice(plan_best_subset),
}
PASSING_STRATEGIES = ("even", "proportional", "poplar")  # those of trainers that accumulate
COMPARED_STRATEGIES = ("optimal", "even")  # compared with every plan; `planner.compare` has all

Where = Literal["inside", "between"]
PLACES: dict[Where, str] = {"inside": "inside hosts", "between": "between hosts"}
FREE = Link(times=Curve(sizes=(1.0,), values=(0.0,)))

EQUAL_TIME_FRACTION = 1e-9  # times within this fraction are the same
FULLY_USED_FRACTION = 0.97  # fraction from which a device counts as fully used


def check_strategy(name: str) -> None:
    """Refuse an unknown strategy.

    Raises:
        InputError: the strategy is unknown.
    """
    if name not in STRATEGIES:
        raise InputError(
            f"there is no strategy '{name}'",
            code="strategy-unknown",
            fix=f"use one of: {', '.join(STRATEGIES)}",
        )


def plan(
    profile: Profile,
    global_batch_size: int,
    *,
    strategy: str = "optimal",
    space: Space = EVERYTHING,
    detailed: bool = True,
) -> Plan:
    """Plan with `strategy` within `space`, and add the reasons (`Plan.reasons`).

    The plan is compared with the optimal and the even plan on all devices, and with the optimal
    plan on each single class, to say if mixing pays. Where links were measured, the measurements
    between all devices are used for any of them. `compare` has all strategies.

    Args:
        detailed: also find what each class is worth, and bound what was searched.

    Raises:
        InputError: there is no such strategy, or the profile does not fit the request.
        NoFeasiblePlanError: no plan of this strategy fits the devices.
        LoadingMemoryError: a host lacks the memory to read the weights.
    """
    check_strategy(strategy)
    if not 1 <= global_batch_size <= LARGEST_BATCH:
        raise InputError(
            f"the global batch must be 1 to {LARGEST_BATCH} samples, and is {global_batch_size}",
            code="global-batch-out-of-range",
            fix="give the number of samples of a step on all devices together",
        )
    request = PlanRequest(global_batch=global_batch_size, space=space, bounds=detailed)
    searched = FastestPlans(profile, request)

    @cache
    def planned(name: str) -> Plan:
        if name == "optimal" and not profile.inputs:
            return _within(space, searched.plan())
        return _within(space, STRATEGIES[name](profile, request))

    chosen = planned(strategy)
    others = [
        _alternative(name, partial(planned, name), chosen)
        for name in COMPARED_STRATEGIES
        if name != strategy
    ]
    others = [
        _explain_even_in_passes(profile, request, chosen) or other if _lacks_room(other) else other
        for other in others
    ]
    slow_hosts = bool(profile.inputs) and slow_down_to_input(profile) is not None
    single = _single_classes(searched, chosen, slow_hosts=slow_hosts)
    best = searched.alone
    few = _find_ungrouped_devices(profile, request, chosen)
    able = tuple(d for d in profile.cluster.devices if d.id not in few)
    reasons = Reasons(
        mixing=_mixing(able, chosen, single),
        hosts_left_out=_hosts_left_out(able, chosen),
        devices_left_out=_devices_left_out(able, chosen),
        in_no_tp_group=few,
        dtypes=_dtypes(profile, chosen),
        binds=find_bottlenecks(profile, chosen),
        worth=ClassWorths(
            profile, request, best, searched.paces, lambda name: searched.of_classes[name].alone
        ).all()
        if detailed
        and best is not None
        and len(chosen.stages) == 1
        and not (
            chosen.uses_tensor_parallel or slow_hosts
        )  # else the search's times are not the plan's
        else (),
        alternatives=(*others, *_find_even_on_fewer(profile, request, chosen), *single),
    )
    return chosen.model_copy(update={"reasons": reasons})


def _within(space: Space, plan: Plan) -> Plan:
    """Return the plan; raise an InputError if techniques outside the space are used."""
    if missing := space.missing(plan):
        raise InputError(
            f"strategy '{plan.strategy}' needs a technique that is not allowed: {missing}",
            code="technique-not-allowed",
            fix="allow it under `techniques`, or use another strategy",
        )
    return plan


def _single_classes(
    searched: FastestPlans, chosen: Plan, *, slow_hosts: bool
) -> list[RejectedPlan]:
    """Return the fastest plan on each class alone; empty for a single class.

    Args:
        slow_hosts: whether reading samples holds devices back, which the search does not see.
    """
    profile, paces = searched.profile, searched.paces
    if len(searched.of_classes) == 1:
        return []
    found, plain = [], not (slow_hosts or _can_have_stages_or_groups(profile, searched.request))
    for name, alone in searched.of_classes.items():
        step_s = compute_least_step_s(profile, alone.request, paces) if plain else None
        if step_s is None:
            reading = partial(STRATEGIES["optimal"], profile, alone.request)
            planned = reading if slow_hosts else alone.plan
            found.append(_alternative(SINGLE_CLASS_PREFIX + name, planned, chosen))
        else:
            why = compare_step_times(step_s, get_prediction(chosen).step_s)
            found.append(RejectedPlan(strategy=SINGLE_CLASS_PREFIX + name, step_s=step_s, why=why))
    return found


def _can_have_stages_or_groups(profile: Profile, request: PlanRequest) -> bool:
    """Return True if plans of several stages or with tensor parallelism may exist."""
    stages = profile.model.needs and request.space.max_pipeline_stages != 1
    return bool(
        stages or get_measured_tp_degrees(profile).intersection(list_tp_degrees(request.space))
    )


def _alternative(name: str, planned: Callable[[], Plan], chosen: Plan) -> RejectedPlan:
    try:
        other = planned()
    except (NoFeasiblePlanError, InputError) as error:
        return RejectedPlan(strategy=name, why=error.what)
    return RejectedPlan(
        strategy=name, step_s=get_prediction(other).step_s, why=explain_step_time(other, chosen)
    )


def _lacks_room(other: RejectedPlan) -> bool:
    """Return True for an even split that does not fit at once."""
    return other.strategy == "even" and other.step_s is None


def _explain_even_in_passes(
    profile: Profile, request: PlanRequest, chosen: Plan
) -> RejectedPlan | None:
    """Compare the even split in passes with the chosen plan; None if none fits."""
    found = plan_in_passes("even", profile, request)
    if found is None:
        return None
    step_s, why = compare_passes(*found, chosen)
    return RejectedPlan(strategy="even", step_s=step_s, why=why)


def _find_even_on_fewer(
    profile: Profile, request: PlanRequest, chosen: Plan
) -> Iterator[RejectedPlan]:
    """Yield the fastest even split without the slowest GPU types, if any fits: nobody would put the
    oldest card into one. Of two types each is compared alone already."""
    devices = list_devices_by_rank(profile, request)
    names = sorted(
        {device.device_class for device in devices},
        key=lambda name: (compute_ideal_samples_per_s(profile, name), name),
    )
    fastest: RejectedPlan | None = None
    for count in range(1, len(names) - 1):
        left_out = names[:count]
        kept = tuple(device.id for device in devices if device.device_class not in left_out)
        fewer = request.model_copy(update={"devices": kept})
        found = _alternative("even", partial(STRATEGIES["even"], profile, fewer), chosen)
        if _lacks_room(found):
            found = _explain_even_in_passes(profile, fewer, chosen) or found
        step_s = found.step_s
        if step_s is not None and (fastest is None or step_s < (fastest.step_s or 0.0)):
            name = EVEN_WITHOUT_PREFIX + ", ".join(left_out)
            fastest = found.model_copy(update={"strategy": name})
    if fastest is not None:
        yield fastest


def plan_in_passes(name: str, profile: Profile, request: PlanRequest) -> tuple[int, Plan] | None:
    """Return the number of passes and the plan of one, where a strategy takes the batch in several
    passes, one after the other, as trainers that accumulate gradients do; None if none fits. Each
    pass pays for its own collectives."""
    devices = len(list_devices_by_rank(profile, request))
    passes = 2
    while request.global_batch // passes >= devices:
        if request.global_batch % passes == 0:
            part = request.model_copy(update={"global_batch": request.global_batch // passes})
            with suppress(NoFeasiblePlanError, InputError):
                return passes, STRATEGIES[name](profile, part)
        passes *= 2
    return None


def compare_passes(passes: int, part: Plan, chosen: Plan) -> tuple[float, str]:
    """Return the seconds of a step in passes, and a comparison with the chosen plan's."""
    step_s = passes * get_prediction(part).step_s
    compared = compare_step_times(step_s, get_prediction(chosen).step_s)
    return step_s, f"in {passes} passes of {part.global_batch} samples: {compared}"


def explain_step_time(other: Plan, chosen: Plan) -> str:
    """Compare a plan's step with the chosen plan's; if slower, name the cause."""
    step_s, own_s = get_prediction(other).step_s, get_prediction(chosen).step_s
    compared = compare_step_times(step_s, own_s)
    return (
        f"{compared}: {_slowest(other)}" if step_s > own_s * (1 + EQUAL_TIME_FRACTION) else compared
    )


def compare_step_times(step_s: float, own_s: float) -> str:
    """Compare a step time with the chosen plan's, in words."""
    if step_s <= own_s * (1 - EQUAL_TIME_FRACTION):
        return f"faster than the chosen plan: its step takes {step_s / own_s:.0%} of the time"
    if step_s <= own_s * (1 + EQUAL_TIME_FRACTION):
        return "as fast as the chosen plan"
    times = step_s / own_s if own_s > 0 else float("inf")
    if times < 1.0005:
        return "less than 0.1% slower"
    return f"{times - 1:.1%} slower" if times < 1.1 else f"{times:.2f} times the step time"


def _slowest(plan: Plan) -> str:
    """Describe the busiest device, or the network if waiting takes over half of the step."""
    prediction = get_prediction(plan)
    if prediction.exposed_communication_s > prediction.step_s / 2:
        return "more than half of it waits for the network"
    rank = max(range(len(plan.workers)), key=lambda r: prediction.workers[r].busy_s)
    worker = plan.workers[rank]
    return (
        f"{worker.device} ({worker.device_class}) computes {worker.samples} "
        f"{'sample' if worker.samples == 1 else 'samples'} in micro-batches of {worker.micro_batch}"
    )


def _find_ungrouped_devices(profile: Profile, request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Return unused devices, too few on a host for a tensor-parallel group of a class, if none may
    compute alone."""
    used = {w.device for w in plan.workers}
    left: dict[tuple[str, str], list[str]] = {}
    for device in profile.cluster.devices:
        if device.id not in used:
            left.setdefault((device.host, device.device_class), []).append(device.id)
    least = min(request.space.tensor_parallel_size)
    return tuple(sorted(name for some in left.values() if len(some) < least for name in some))


def _mixing(
    able: Sequence[Device], plan: Plan, single: list[RejectedPlan]
) -> MixingComparison | None:
    """Compare the plan with the best single class; None if only one class could train.

    Args:
        able: devices that could take part.
    """
    classes = {d.device_class for d in able}
    if not single or len(classes) == 1:
        return None
    used = {w.device_class for w in plan.workers}
    possible = [
        (a.step_s, a.strategy.removeprefix(SINGLE_CLASS_PREFIX))
        for a in single
        if a.step_s is not None
    ]
    if len(used) == 1:
        (only,) = used
        possible.append((get_prediction(plan).step_s, only))
    best_s, best = min(possible, default=(None, None))
    speedup = None if best_s is None else best_s / get_prediction(plan).step_s
    pays = len(used) > 1 and (speedup is None or speedup > 1.0 + EQUAL_TIME_FRACTION)
    left_out = tuple(sorted(classes - used))
    return MixingComparison(pays=pays, best_class=best, speedup=speedup, left_out=left_out)


def _hosts_left_out(able: Sequence[Device], plan: Plan) -> tuple[str, ...]:
    """Return unused hosts with devices of used classes."""
    used = {w.device_class for w in plan.workers}
    with_used = {d.host for d in able if d.device_class in used}
    return tuple(sorted(with_used - {w.host for w in plan.workers}))


def _devices_left_out(able: Sequence[Device], plan: Plan) -> tuple[str, ...]:
    """Return unused devices of used classes on used hosts."""
    classes, hosts = {w.device_class for w in plan.workers}, {w.host for w in plan.workers}
    there = {d.id for d in able if d.device_class in classes and d.host in hosts}
    return tuple(sorted(there - {w.device for w in plan.workers}))


def _dtypes(profile: Profile, plan: Plan) -> tuple[DtypeReason, ...]:
    """Return the compute dtype of each class, if classes differ or a class is slow in its dtype."""
    computed = {w.device_class: w.compute_dtype for w in plan.workers}
    classes = {name: profile.cluster.class_named(name) for name in sorted(computed)}
    badly = any(computed[name] in get_dtype_support(c).slow for name, c in classes.items())
    if len(set(computed.values())) == 1 and not badly:
        return ()
    return tuple(
        DtypeReason(
            device_class=name,
            compute_dtype=computed[name],
            why=explain_compute_dtype(c, computed[name]),
        )
        for name, c in classes.items()
    )


def find_bottlenecks(profile: Profile, plan: Plan) -> Bottlenecks:
    """Return the bottlenecks: the compute, memory and link limiting the step."""
    prediction = get_prediction(plan)
    step_s, workers = prediction.step_s, prediction.workers
    busiest = max(w.busy_s for w in workers)
    named = [(planned.device_class, w) for planned, w in zip(plan.workers, workers)]
    busy = {name for name, w in named if w.busy_s >= FULLY_USED_FRACTION * busiest}
    full = {name for name, w in named if w.peak_bytes >= FULLY_USED_FRACTION * w.memory_limit_bytes}
    waiting = prediction.exposed_communication_s / step_s if step_s > 0 else 0.0
    return Bottlenecks(
        compute=tuple(sorted(busy)),
        memory=tuple(sorted(full)),
        link=_slow_link(profile, plan) if waiting > 1 - FULLY_USED_FRACTION else "",
        waiting=waiting,
    )


def _slow_link(profile: Profile, plan: Plan) -> str:
    """Return the links making the step wait longest: freeing these shortens the step most."""
    if len({w.host for w in plan.workers}) == 1:
        return _named(profile, plan, "inside")
    without = {
        where: predict_step_seconds(freed, plan)
        for where, freed in _with_free_links(profile).items()
    }
    if not without:
        return "between all devices, as measured"
    return _named(profile, plan, min(without, key=lambda where: (without[where], where)))


def _with_free_links(profile: Profile) -> dict[Where, Profile]:
    """Return profiles with free links of each kind, if links are stated."""
    network = profile.cluster.network
    if network is None or profile.network:
        return {}
    found: dict[Where, Profile] = {}
    for where in PLACES:
        rest = tuple(e for e in network.exceptions if e.where != where)
        free = network.model_copy(update={where: FREE, "exceptions": rest})
        cluster = profile.cluster.model_copy(update={"network": free})
        found[where] = profile.model_copy(update={"cluster": cluster})
    return found


def _named(profile: Profile, plan: Plan, where: Where) -> str:
    """Return a place with the stated name of its slowest link."""
    network = profile.cluster.network
    if network is None or profile.network:
        return f"{PLACES[where]}, as measured"
    used = sorted({w.device_class for w in plan.workers})
    links = [network.of(where, one, other) for one in used for other in used]
    slowest = min((k for k in links if k is not None), key=lambda k: k.largest_bytes_per_s)
    return f"{PLACES[where]} ({slowest.name})" if slowest.name else PLACES[where]
