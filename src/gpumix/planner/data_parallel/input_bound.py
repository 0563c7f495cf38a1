"""Plans where hosts read samples more slowly than devices could compute them.

The search knows devices, not host cores. It is therefore run again on a profile in which a device
takes at least as long for a sample as its part of the host's cores, or its given readers, take to
read it. Of both plans, the faster one with the data counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import inf

from gpumix.cost.input_time import compute_host_read_rates, compute_rank_read_rates
from gpumix.cost.memory_layout.curves import interpolate_seconds
from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import (
    PlanRequest,
    Strategy,
    attach_bound,
    get_prediction,
    restore_device_classes,
)
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import ROOT, ClassProfile, Profile

CORNERS = 24  # powers of two added to the sizes of lengthened curves
SIMILAR_READ_FACTOR = 1.1  # hosts within this factor in seconds to read a sample count as alike
MAX_HOST_GROUPS = 4  # of hosts, by seconds to read a sample, that a class is divided into


def slow_down_to_input(profile: Profile) -> Profile | None:
    """Return the profile with devices slowed to the read speed of hosts; None if all hosts keep up.
    Devices of a class on hosts of unlike speed get separate classes; hosts counted as alike are as
    slow as the slowest of them."""
    least_s = _least_seconds(profile)
    found: dict[str, ClassProfile] = {}
    renamed: dict[tuple[str, str], str] = {}  # by class and host
    for one in profile.classes:
        seconds = {host: s for (name, host), s in least_s.items() if name == one.device_class}
        for number, hosts in enumerate(_group_similar_hosts(seconds)):
            slower = _slow_down_class(profile, one, max(seconds[host] for host in hosts))
            name = f"{one.device_class}-{number}"
            found[name] = slower.model_copy(update={"device_class": name})
            renamed |= {(one.device_class, host): name for host in hosts}
    if all(found[new].units == profile.of_class(old).units for (old, _), new in renamed.items()):
        return None
    update = {"cluster": _with_classes(profile.cluster, renamed), "inputs": (), "tp_profiles": ()}
    return profile.model_copy(update={"classes": tuple(found.values()), **update})


def _group_similar_hosts(seconds: dict[str, float]) -> Iterator[tuple[str, ...]]:
    """Yield groups of hosts with nearly equal seconds, the quickest first; the last is the rest."""
    left, kinds = sorted(seconds, key=lambda host: (seconds[host], host)), 1
    while left:
        most_s = inf if kinds == MAX_HOST_GROUPS else SIMILAR_READ_FACTOR * seconds[left[0]]
        yield tuple(host for host in left if seconds[host] <= most_s)
        left, kinds = [host for host in left if seconds[host] > most_s], kinds + 1


def _with_classes(cluster: Cluster, renamed: Mapping[tuple[str, str], str]) -> Cluster:
    of_old = {(old, new): cluster.class_named(old) for (old, _), new in renamed.items()}
    classes = [one.model_copy(update={"name": new}) for (_, new), one in of_old.items()]
    devices = [
        d.model_copy(update={"device_class": renamed[d.device_class, d.host]})
        for d in cluster.devices
    ]
    return cluster.model_copy(update={"classes": tuple(classes), "devices": tuple(devices)})


def _with_own_classes(profile: Profile, plan: Plan) -> Plan:
    """Restore the classes of `profile` in a plan for the slowed-down profile."""
    plan = restore_device_classes(profile.cluster, plan)
    used = {worker.device_class for worker in plan.workers}
    estimated = tuple(name for name in profile.estimated if name in used)
    return plan.model_copy(update={"estimated": estimated})


def bound_step_s(profile: Profile, batch: int) -> float:
    """Return a lower bound of the step in seconds, for any division of samples over hosts."""
    rates = compute_host_read_rates(profile)
    if not rates or any(device.host not in rates for device in profile.cluster.devices):
        return 0.0
    return batch / sum(rates.values())


def _least_seconds(profile: Profile) -> dict[tuple[str, str], float]:
    """Return the least seconds per sample by class and host; 0 where the host keeps up."""
    rates, of_ranks = compute_host_read_rates(profile), compute_rank_read_rates(profile)
    speeds = {one.device_class: _speed(profile, one) for one in profile.classes}
    there: dict[str, Counter[str]] = defaultdict(Counter)
    for device in profile.cluster.devices:
        there[device.host][device.device_class] += 1
    found: dict[tuple[str, str], float] = {}
    for host, counts in there.items():
        together = sum(n * speeds[name] for name, n in counts.items())
        slow = host in rates and rates[host] < together
        for name in counts:
            own_s = together / speeds[name] / rates[host] if slow else 0.0
            slow_rank = of_ranks.get(host, inf) < speeds[name]
            found[name, host] = max(own_s, 1.0 / of_ranks[host] if slow_rank else 0.0)
    return found


def _speed(profile: Profile, of_class: ClassProfile) -> float:
    """Return the samples per second of a device at its best."""
    size = of_class.largest_micro_batch or max(of_class.units[ROOT].forward.sizes)
    return size / max(_seconds(profile, of_class, float(size)), 1e-12)


def _seconds(profile: Profile, of_class: ClassProfile, size: float) -> float:
    """Return the seconds of both passes of a micro-batch through the model."""
    calls = Counter(profile.model.kind_of_call) | Counter([ROOT])
    return sum(
        n * float(interpolate_seconds(curve, size))
        for kind, n in calls.items()
        for curve in (of_class.units[kind].forward, of_class.units[kind].backward)
    )


def _slow_down_class(profile: Profile, of_class: ClassProfile, least_s: float) -> ClassProfile:
    """Return a class taking at least `least_s` per sample; the extra time comes before the first
    unit, where nothing else happens."""
    root = of_class.units[ROOT]
    sizes = sorted({*root.forward.sizes, *(float(2**k) for k in range(CORNERS))})
    sizes = [size for size in sizes if size <= max(root.forward.sizes)]
    more = [max(0.0, size * least_s - _seconds(profile, of_class, size)) for size in sizes]
    if not any(more):
        return of_class
    values = [
        float(interpolate_seconds(root.forward, size)) + extra for size, extra in zip(sizes, more)
    ]
    forward = Curve(sizes=tuple(sizes), values=tuple(values))
    units = {**of_class.units, ROOT: root.model_copy(update={"forward": forward})}
    return of_class.model_copy(update={"units": units})


def account_for_input(strategy: Strategy) -> Strategy:
    """Wrap a strategy to account for the read speed of hosts."""

    def planned(profile: Profile, request: PlanRequest) -> Plan:
        free = profile.model_copy(update={"inputs": ()})
        plan = strategy(free, request)
        if not profile.inputs:
            return plan
        bound_s = max(
            get_prediction(plan).bound_s or 0.0, bound_step_s(profile, request.global_batch)
        )
        plans = [_predict_with_input(profile, plan, bound_s)]
        slower = slow_down_to_input(profile)
        if slower is not None and get_prediction(plans[0]).input_s > get_prediction(plan).step_s:
            for one in _list_requests(request):
                with suppress(NoFeasiblePlanError, InputError):
                    plan = _with_own_classes(profile, strategy(slower, one))
                    plans.append(_predict_with_input(profile, plan, bound_s))
        return min(plans, key=lambda one: get_prediction(one).step_s)

    return planned


def _list_requests(request: PlanRequest) -> list[PlanRequest]:
    """Return the request, and a single-stage variant if several stages are allowed: only the first
    stage is charged for reading, though all read, so stages look better than they are."""
    space = request.space
    if space.min_pipeline_stages > 1 or space.max_pipeline_stages == 1:
        return [request]
    one_stage = space.model_copy(update={"max_pipeline_stages": 1})
    return [request, request.model_copy(update={"space": one_stage})]


def _predict_with_input(profile: Profile, plan: Plan, bound_s: float) -> Plan:
    return attach_bound(plan.model_copy(update={"prediction": predict(profile, plan)}), bound_s)
