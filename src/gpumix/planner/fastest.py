"""The fastest plan: of one stage, or of several where that is faster, or alone fits."""

from __future__ import annotations

from gpumix.planner.base import WORTHWHILE, PlanRequest, predicted
from gpumix.planner.best_subset import best_subset, single_classes
from gpumix.planner.finish import finished
from gpumix.planner.optimal import optimal
from gpumix.planner.options import Paces
from gpumix.planner.staged import staged
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile


def fastest(profile: Profile, request: PlanRequest) -> Plan:
    """The plan with the shortest step of all that the request's space allows.

    Raises:
        InputError: the request names devices that the profile does not know.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
    """
    paces = Paces(profile, request.global_batch)
    return fastest_beside(profile, request, optimal_or_why(profile, request, paces), paces)


def optimal_or_why(
    profile: Profile, request: PlanRequest, paces: Paces
) -> Plan | NoFeasiblePlanError:
    """The optimal plan of one stage, or why there is none."""
    try:
        return optimal(profile, request, paces)
    except NoFeasiblePlanError as error:
        return error


def fastest_beside(
    profile: Profile, request: PlanRequest, other: Plan | NoFeasiblePlanError, paces: Paces
) -> Plan:
    """The same, where the optimal plan of one stage is there, or is known not to be.

    Raises:
        NoFeasiblePlanError: `other`, and no plan of several stages fits.
    """
    found = other
    if request.space.least_stages > 1:
        found = staged(profile, request).model_copy(update={"strategy": "optimal"})
    else:
        if isinstance(found, Plan):
            found = finished(profile, request, found, paces)
            found = _of_one_class(profile, request, _worth_leaving(found), paces) or found
        found = _staged(profile, request, _worth_leaving(found)) or found
    classes = list(single_classes(profile, request)) if request.space.leave_out else []
    for _, alone in classes if len(classes) > 1 else ():  # all of one were looked at
        found = _staged(profile, alone, _worth_leaving(found)) or found
    if isinstance(found, NoFeasiblePlanError):
        raise found
    return found


def _worth_leaving(found: Plan | NoFeasiblePlanError) -> float:
    """Another plan is worth while if its step takes less."""
    if isinstance(found, NoFeasiblePlanError):
        return float("inf")
    return predicted(found).step_s * (1.0 - WORTHWHILE)


def _of_one_class(
    profile: Profile, request: PlanRequest, below_s: float, paces: Paces
) -> Plan | None:
    """A plan on one class alone. Where links were measured the optimal plan leaves nobody out, for
    they are known of all devices only: fewer devices take no longer over them."""
    if not (profile.network and request.space.leave_out):
        return None
    try:
        plan = best_subset(profile, request)
    except NoFeasiblePlanError:
        return None
    if predicted(plan).step_s >= below_s:
        return None
    devices = tuple(worker.device for worker in plan.workers)
    alone = request.model_copy(update={"devices": devices})
    plan = finished(profile, alone, plan, paces)
    return plan.model_copy(update={"strategy": "optimal"})


def _staged(profile: Profile, request: PlanRequest, below_s: float) -> Plan | None:
    """A plan of several stages; None if one is all that there may be, or that fits in the time."""
    if request.space.most_stages == 1:
        return None
    try:
        return staged(profile, request, below_s).model_copy(update={"strategy": "optimal"})
    except (InputError, NoFeasiblePlanError):
        return None
