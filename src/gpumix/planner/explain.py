"""A plan with its reasons: what it was weighed against."""

from __future__ import annotations

from gpumix.planner.base import PlanRequest, Strategy, predicted, ranked_devices
from gpumix.planner.even import even
from gpumix.planner.optimal import optimal
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Alternative, Plan
from gpumix.spec.profile import Profile

STRATEGIES: dict[str, Strategy] = {"optimal": optimal, "even": even}


def check_strategy(name: str) -> None:
    """Refuse a strategy that there is not.

    Raises:
        InputError: there is no such strategy.
    """
    if name not in STRATEGIES:
        raise InputError(
            f"there is no strategy '{name}'", fix=f"use one of: {', '.join(STRATEGIES)}"
        )


def plan(profile: Profile, request: PlanRequest | int, strategy: str = "optimal") -> Plan:
    """Plan with `strategy`, and weigh the result against the others.

    The alternatives are the other strategies on all devices, and the optimal plan on the devices of
    each single class, which says whether mixing pays. Their links are taken to be those that were
    measured between all devices.

    Raises:
        InputError: there is no such strategy, or the profile does not fit the request.
        NoFeasiblePlanError: no plan of this strategy fits the devices.
    """
    check_strategy(strategy)
    if isinstance(request, int):
        request = PlanRequest(global_batch=request)
    chosen = STRATEGIES[strategy](profile, request)
    others = [
        _alternative(name, other, profile, request, chosen)
        for name, other in STRATEGIES.items()
        if name != strategy
    ]
    others += _single_classes(profile, request, chosen)
    return chosen.model_copy(update={"alternatives": tuple(others)})


def _single_classes(profile: Profile, request: PlanRequest, chosen: Plan) -> list[Alternative]:
    """The optimal plan on each class alone; none if there is only one class."""
    devices = ranked_devices(profile, request)
    names = sorted({d.device_class for d in devices})
    if len(names) == 1:
        return []
    return [
        _alternative(
            f"only {name}",
            optimal,
            profile,
            request.model_copy(
                update={"devices": tuple(d.id for d in devices if d.device_class == name)}
            ),
            chosen,
        )
        for name in names
    ]


def _alternative(
    name: str, strategy: Strategy, profile: Profile, request: PlanRequest, chosen: Plan
) -> Alternative:
    try:
        other = strategy(profile, request)
    except (NoFeasiblePlanError, InputError) as error:
        return Alternative(strategy=name, why=error.what)
    step = predicted(other).step_s
    return Alternative(strategy=name, step_s=step, why=_verdict(other, step, chosen))


def _verdict(other: Plan, step_s: float, chosen: Plan) -> str:
    """How its step compares, and which device makes it so long."""
    own = predicted(chosen).step_s
    if step_s <= own * (1 - 1e-9):
        return f"faster than the chosen plan: its step takes {step_s / own:.0%} of the time"
    if step_s <= own * (1 + 1e-9):
        return "as fast as the chosen plan"
    return f"{step_s / own:.2f} times the step time: {_slowest(other)}"


def _slowest(plan: Plan) -> str:
    """The device that computes longest, or the network where it takes more than computing."""
    prediction = predicted(plan)
    if prediction.exposed_communication_s > prediction.step_s / 2:
        return "more than half of it waits for the network"
    rank = max(range(len(plan.workers)), key=lambda r: prediction.workers[r].busy_s)
    worker = plan.workers[rank]
    return (
        f"{worker.device} ({worker.device_class}) computes {worker.samples} samples in "
        f"micro-batches of {worker.micro_batch}"
    )
