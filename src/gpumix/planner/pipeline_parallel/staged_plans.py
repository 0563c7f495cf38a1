"""Plans of several stages: of devices, of tensor-parallel groups of one size or of several, and of
large clusters."""

from __future__ import annotations

from gpumix.cost.pipeline.staged_step import compute_edge_seconds
from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import (
    PlanRequest,
    attach_bound,
    compute_time_to_beat,
    get_prediction,
    is_within_memory,
    list_devices_by_rank,
    select_by_devices,
)
from gpumix.planner.pipeline_parallel.host_reduction import Reduction, reduce_hosts
from gpumix.planner.pipeline_parallel.search import FEW_DEVICES, StageSearch
from gpumix.planner.pipeline_parallel.tensor_parallel_search import (
    Searched,
    search_mixed_degrees,
)
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile

# Mixtures of tensor parallel degrees in one stage, by devices; each takes its own search.
MIXTURES = ((12, 2), (FEW_DEVICES, 1), (float("inf"), 0))
# Times the limit, for plans with neighbors to try, by devices.
NEIGHBOR_LIMITS = ((12, 1.05), (FEW_DEVICES, 1.03), (float("inf"), 1.0))
# Collectives of all devices take longer than those of a part, and a replay of all takes long: a
# plan of a part must be faster than the limit by this factor.
PART_FRACTION = 0.98


def plan_staged(profile: Profile, request: PlanRequest) -> Plan:
    """Return the fastest plan of several stages.

    Raises:
        InputError: the request names devices unknown to the profile, there is only one device or
            one unit, the techniques leave out what stages need, or the profile does not say what
            units need of each other.
        NoFeasiblePlanError: no plan of several stages fits.
    """
    plan, _ = plan_staged_below(profile, request, float("inf"))
    assert plan is not None
    return plan


def plan_staged_below(
    profile: Profile, request: PlanRequest, below_s: float
) -> tuple[Plan | None, float]:
    """Return the fastest plan if faster than `below_s`, else None; and a lower bound of all plans
    of several stages in seconds, at most `below_s`. Tensor-parallel groups of unlike sizes in one
    stage are tried last, as devices of unlike classes.

    Raises:
        InputError, NoFeasiblePlanError: no plan can exist, or none fits, however slow.
    """
    if reduction := reduce_hosts(profile, request):
        reduced, bound_s = _search_reduced(profile, reduction, below_s)
        if reduced is not None or below_s < float("inf"):
            return reduced, bound_s
    devices = len(list_devices_by_rank(profile, request))
    best, failure = None, None
    bounds_s: list[float | None] = [below_s]
    try:
        margin = select_by_devices(NEIGHBOR_LIMITS, devices)
        best, bounds_s[0] = StageSearch(profile, request, below_s, margin=margin).run()
    except NoFeasiblePlanError as error:
        failure = error
    if best is not None:
        below_s = compute_time_to_beat(best)
    most = int(select_by_devices(MIXTURES, devices))
    other, more_s = search_mixed_degrees(
        profile, request, _search_below, below_s, most=most, in_stages=True
    )
    best = other or best
    if best is None and failure is not None:
        raise failure
    bound_s = min(one for one in [*bounds_s, *more_s] if one is not None)
    return None if best is None else attach_bound(best, bound_s), bound_s


def _search_reduced(
    profile: Profile, reduction: Reduction, below_s: float
) -> tuple[Plan | None, float]:
    """Search on fewer devices, and build the plan of all. The plans looked at are copies of plans
    that fit on few: each computes as much, and its collectives take no less time among more."""
    found, bound_s = plan_staged_below(profile, reduction.request, below_s)
    if found is None or get_prediction(found).step_s >= below_s * PART_FRACTION:
        return None, bound_s
    plan = reduction.expand(found)
    # A replay of all takes long; its step is longer by about the collectives of a stage.
    edges = zip(compute_edge_seconds(profile, plan), compute_edge_seconds(profile, found))
    longer_s = max(of_all - of_few for of_all, of_few in edges)
    if get_prediction(found).step_s + longer_s >= below_s:
        return None, bound_s
    expected = predict(profile, plan)
    if not is_within_memory(expected.workers) or expected.step_s >= below_s:
        return None, bound_s
    return attach_bound(plan.model_copy(update={"prediction": expected}), bound_s), bound_s


def _search_below(profile: Profile, request: PlanRequest, below_s: float) -> Searched:
    return StageSearch(profile, request, below_s, proves=False).run()
