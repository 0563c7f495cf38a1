"""The fastest plan: of one stage, or of several where that is faster, or alone fits; with devices
that compute alone, or in teams."""

from __future__ import annotations

from gpumix.planner.base import PlanRequest, bounded, predicted, worth_leaving
from gpumix.planner.best_subset import best_subset, single_classes
from gpumix.planner.finish import finished
from gpumix.planner.optimal import optimal
from gpumix.planner.options import Paces
from gpumix.planner.staged import staged_below
from gpumix.planner.teams import of_any_degree
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
    """The same, where the optimal plan of one stage, of devices that compute alone, is there, or is
    known not to be.

    Raises:
        InputError, NoFeasiblePlanError: no plan fits; why not in one stage, where one is allowed.
    """
    best = _Best()
    if request.space.least_stages == 1:
        best.of_one_stage(profile, request, other, paces)
    best.of_stages(profile, request)
    classes = list(single_classes(profile, request)) if request.space.leave_out else []
    for _, alone in classes if len(classes) > 1 else ():  # all of one were looked at
        best.of_stages(profile, alone)
    if best.plan is None:
        raise best.failures[0]
    return bounded(best.plan.model_copy(update={"strategy": "optimal"}), best.bound_s)


class _Best:
    """The fastest plan so far, seconds that none of those that were weighed takes less than, and
    why there are none."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.bound_s = float("inf")
        self.failures: list[InputError | NoFeasiblePlanError] = []

    def of_one_stage(
        self,
        profile: Profile,
        request: PlanRequest,
        other: Plan | NoFeasiblePlanError,
        paces: Paces,
    ) -> None:
        one = request.model_copy(
            update={"space": request.space.model_copy(update={"most_stages": 1})}
        )
        try:
            self.plan = of_any_degree(
                profile, one, _one_stage, lambda: _finished(profile, one, other, paces)
            )
        except (InputError, NoFeasiblePlanError) as error:
            self.failures.append(error)
        else:
            self.bound_s = predicted(self.plan).bound_s or 0.0

    def of_stages(self, profile: Profile, request: PlanRequest) -> None:
        """Of several stages: taken where it is worth while."""
        if request.space.most_stages == 1:
            return
        below_s = float("inf") if self.plan is None else worth_leaving(self.plan)
        try:
            found, bound_s = staged_below(profile, request, below_s)
        except (InputError, NoFeasiblePlanError) as error:
            self.failures.append(error)
            return
        self.plan, self.bound_s = found or self.plan, min(self.bound_s, bound_s)


def _one_stage(profile: Profile, request: PlanRequest) -> Plan:
    paces = Paces(profile, request.global_batch)
    return _finished(profile, request, optimal_or_why(profile, request, paces), paces)


def _finished(
    profile: Profile, request: PlanRequest, found: Plan | NoFeasiblePlanError, paces: Paces
) -> Plan:
    """The optimal plan with the last touches, or one on one class alone.

    Raises:
        NoFeasiblePlanError: there is neither.
    """
    best, below_s, bound_s = None, float("inf"), None
    if isinstance(found, Plan):
        best = finished(profile, request, found, paces)
        below_s, bound_s = worth_leaving(best), predicted(best).bound_s
    alone = _of_one_class(profile, request, below_s, paces)
    if alone is not None:
        return alone if bound_s is None else bounded(alone, bound_s)
    if best is None:
        assert isinstance(found, NoFeasiblePlanError)
        raise found
    return best


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
    return finished(profile, alone, plan, paces)
