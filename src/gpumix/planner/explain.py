"""A plan with its reasons: what it was weighed against, whether mixing pays, what binds."""

from __future__ import annotations

from gpumix.planner.base import PlanRequest, Strategy, predicted
from gpumix.planner.best_subset import best_subset, single_classes
from gpumix.planner.cephalo import cephalo
from gpumix.planner.even import even
from gpumix.planner.optimal import optimal
from gpumix.planner.poplar import poplar
from gpumix.planner.proportional import proportional
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Alternative, Plan
from gpumix.spec.profile import Profile

STRATEGIES: dict[str, Strategy] = {
    "optimal": optimal,
    "even": even,
    "proportional": proportional,
    "poplar": poplar,
    "cephalo": cephalo,
    "best-subset": best_subset,
}
WEIGHED = ("optimal", "even")  # against every plan; `planner.compare` weighs all
SINGLE = "only "  # the strategy of an alternative on one class, before the name of the class

ALMOST = 0.97  # from here on a device counts as fully used


def check_strategy(name: str) -> None:
    """Refuse a strategy that there is not.

    Raises:
        InputError: there is no such strategy.
    """
    if name not in STRATEGIES:
        raise InputError(
            f"there is no strategy '{name}'", fix=f"use one of: {', '.join(STRATEGIES)}"
        )


def plan(profile: Profile, global_batch: int, strategy: str = "optimal") -> Plan:
    """Plan with `strategy`, and weigh the result against others.

    The alternatives are the optimal and the even plan on all devices, and the optimal plan on the
    devices of each single class, which says whether mixing pays. Their links are taken to be those
    that were measured between all devices. `compare` weighs all strategies.

    Raises:
        InputError: there is no such strategy, or the profile does not fit the request.
        NoFeasiblePlanError: no plan of this strategy fits the devices.
    """
    check_strategy(strategy)
    request = PlanRequest(global_batch=global_batch)
    chosen = STRATEGIES[strategy](profile, request)
    others = [
        _alternative(name, STRATEGIES[name], profile, request, chosen)
        for name in WEIGHED
        if name != strategy
    ]
    others += _single_classes(profile, request, chosen)
    return chosen.model_copy(update={"alternatives": tuple(others)})


def _single_classes(profile: Profile, request: PlanRequest, chosen: Plan) -> list[Alternative]:
    """The optimal plan on each class alone; none if there is only one class."""
    alone = list(single_classes(profile, request))
    if len(alone) == 1:
        return []
    return [
        _alternative(SINGLE + name, optimal, profile, of_class, chosen) for name, of_class in alone
    ]


def _alternative(
    name: str, strategy: Strategy, profile: Profile, request: PlanRequest, chosen: Plan
) -> Alternative:
    try:
        other = strategy(profile, request)
    except (NoFeasiblePlanError, InputError) as error:
        return Alternative(strategy=name, why=error.what)
    return Alternative(strategy=name, step_s=predicted(other).step_s, why=verdict(other, chosen))


def verdict(other: Plan, chosen: Plan) -> str:
    """How its step compares, and which device makes it so long."""
    own, step_s = predicted(chosen).step_s, predicted(other).step_s
    if step_s <= own * (1 - 1e-9):
        return f"faster than the chosen plan: its step takes {step_s / own:.0%} of the time"
    if step_s <= own * (1 + 1e-9):
        return "as fast as the chosen plan"
    times = step_s / own if own > 0 else float("inf")
    return f"{times:.2f} times the step time: {_slowest(other)}"


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


def mixing(plan: Plan) -> list[str]:
    """The chosen plan against the best single class; nothing if there is only one."""
    step_s = predicted(plan).step_s
    single = [a for a in plan.alternatives if a.strategy.startswith(SINGLE)]
    if not single:
        return []
    possible = [(a.step_s, a.strategy) for a in single if a.step_s is not None]
    if not possible:
        return ["mixing pays: no class could train this alone"]
    best_s, best = min(possible)
    if best_s < step_s:
        return [
            f"mixing does not pay: {best} takes {best_s / step_s:.0%} of the time; give the job "
            "a cluster of that class"
        ]
    return [f"mixing pays: {best_s / step_s:.2f} times as fast as {best}, the best single class"]


def binding(plan: Plan) -> str:
    """What a faster step would need more of."""
    prediction = predicted(plan)
    step_s, workers = prediction.step_s, prediction.workers
    class_of = {w.device: w.device_class for w in plan.workers}
    busiest = max(w.busy_s for w in workers)
    busy = {class_of[w.device] for w in workers if w.busy_s >= ALMOST * busiest}
    full = {class_of[w.device] for w in workers if w.peak_bytes >= ALMOST * w.memory_limit_bytes}
    found = [f"compute of {', '.join(sorted(busy))}"]
    if full:
        found.append(f"memory of {', '.join(sorted(full))}")
    waiting = prediction.exposed_communication_s / step_s
    if waiting > 1 - ALMOST:
        found.append(f"the network ({waiting:.0%} of the step)")
    return "; ".join(found)
