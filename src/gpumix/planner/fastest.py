"""The fastest plan: of one stage, or of several where that is faster, or alone fits."""

from __future__ import annotations

from gpumix.planner.base import PlanRequest, predicted
from gpumix.planner.optimal import optimal
from gpumix.planner.staged import staged
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile

WORTHWHILE = 0.01  # by less, stages are not worth their messages


def fastest(profile: Profile, request: PlanRequest) -> Plan:
    """The plan with the shortest step of all that the request's space allows.

    Raises:
        InputError: the request names devices that the profile does not know.
        NoFeasiblePlanError: the devices cannot hold the state and the batch.
    """
    try:
        plan = optimal(profile, request)
    except NoFeasiblePlanError as error:
        return in_stages(profile, request, error)
    return in_stages(profile, request, plan)


def in_stages(profile: Profile, request: PlanRequest, other: Plan | NoFeasiblePlanError) -> Plan:
    """A plan of several stages if it is faster than `other`, which has one; else that.

    Raises:
        NoFeasiblePlanError: `other`, and no plan of several stages fits.
    """
    below_s = float("inf")
    if isinstance(other, Plan):
        below_s = predicted(other).step_s * (1.0 - WORTHWHILE)
    found = _staged_below(profile, request, below_s) or other
    if isinstance(found, NoFeasiblePlanError):
        raise found
    return found


def _staged_below(profile: Profile, request: PlanRequest, below_s: float) -> Plan | None:
    """A plan of several stages; None if one is all that there may be, or that fits in the time."""
    if request.space.most_stages == 1:
        return None
    try:
        return staged(profile, request, below_s).model_copy(update={"strategy": "optimal"})
    except (InputError, NoFeasiblePlanError):
        return None
