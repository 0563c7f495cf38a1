"""Strategy `best-subset`: the fastest plan on the devices of one class."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.planner.common.strategy import PlanRequest, get_prediction, list_devices_by_rank
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile


def plan_best_subset(profile: Profile, request: PlanRequest) -> Plan:
    """Return the fastest of the optimal plans on each class alone; ties go by class name.

    Raises:
        InputError: the profile lacks a device.
        NoFeasiblePlanError: no class alone has room.
    """
    plans, reasons = [], []
    for name, alone in iterate_class_requests(profile, request):
        try:
            plans.append(plan_one_stage(profile, alone))
        except NoFeasiblePlanError as error:
            reasons.append((name, error.what))
    if not plans:
        raise NoFeasiblePlanError(
            f"no single device class has room for a global batch of {request.global_batch}",
            code="no-class-fits-alone",
            why="; ".join(f"only {name}: {what}" for name, what in reasons),
            fix="use `strategy: optimal`, which mixes classes and may fit",
        )
    best = min(plans, key=lambda plan: get_prediction(plan).step_s)
    return best.model_copy(update={"strategy": "best-subset"})


def iterate_class_requests(
    profile: Profile, request: PlanRequest
) -> Iterator[tuple[str, PlanRequest]]:
    """Yield each class by name, with the request for its devices alone."""
    devices = list_devices_by_rank(profile, request)
    for name in sorted({d.device_class for d in devices}):
        alone = tuple(d.id for d in devices if d.device_class == name)
        yield name, request.model_copy(update={"devices": alone})
