"""The worth of changes to a cluster: the fastest plan of each, compared with today's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import Field

from gpumix.planner.common.strategy import PlanRequest, predicted
from gpumix.planner.optimal import fastest
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan, TokenRate
from gpumix.schema.profile.profile import Profile
from gpumix.schema.value import Value

SECONDS_PER_HOUR = 3600.0
BILLION = 1e9


class Outlook(Value):
    """The forecast of one cluster."""

    change: str
    devices: dict[str, int] = Field(description="by class, those that take part in the plan")
    step_s: float | None = Field(default=None, description="None: nothing fits")
    tokens_per_s: TokenRate | None = None
    worth: float | None = Field(
        default=None, description="tokens a second against those of the first, 0.1 is 10 % more"
    )
    price_per_hour: float | None = None
    price_per_billion_tokens: float | None = None
    emulated: bool = False
    estimated: tuple[str, ...] = Field(
        default=(), description="device classes whose times are estimates from their datasheets"
    )
    why: str = ""


def outlooks(
    variants: Sequence[tuple[str, Profile]],
    request: PlanRequest,
    prices: Mapping[str, float] | None = None,
) -> list[Outlook]:
    """Find the fastest plan of each variant, of any number of stages, and compare with the first.

    Args:
        prices: price of one device of each class per hour, in any currency; all devices of a
            cluster are paid for, also idle ones.

    Raises:
        InputError: a class has no price.
    """
    found: list[Outlook] = []
    for name, profile in variants:
        found.append(_outlook(name, profile, request, prices, found[0] if found else None))
    return found


def _outlook(
    change: str,
    profile: Profile,
    request: PlanRequest,
    prices: Mapping[str, float] | None,
    first: Outlook | None,
) -> Outlook:
    there = Counter(d.device_class for d in profile.cluster.devices)
    hourly = None if prices is None else _hourly(there, prices)
    cluster = Outlook(
        change=change,
        devices=dict(there),
        price_per_hour=hourly,
        emulated=profile.cluster.emulated,
        estimated=profile.estimated,
    )
    try:
        plan = fastest(profile, request)
    except NoFeasiblePlanError as error:
        return cluster.model_copy(update={"why": error.what})
    speed = predicted(plan).tokens_per_s
    paid = None if hourly is None else hourly / SECONDS_PER_HOUR / speed * BILLION
    return cluster.model_copy(
        update={
            "step_s": predicted(plan).step_s,
            "tokens_per_s": speed,
            "worth": None if first is None else _worth(speed, first.tokens_per_s),
            "price_per_billion_tokens": paid,
            "why": _idle(there, plan),
        }
    )


def _worth(speed: float, before: float | None) -> float | None:
    """Return the fraction gained; None if the speed before is unknown or a step took no time."""
    return None if before is None or before == float("inf") else speed / before - 1.0


def _hourly(there: Mapping[str, int], prices: Mapping[str, float]) -> float:
    missing = sorted(set(there) - set(prices))
    if missing:
        raise InputError(
            f"class '{missing[0]}' has no price",
            where="--price",
            fix=f"give one an hour and device: --price {missing[0]}=0.35",
        )
    return sum(count * prices[name] for name, count in there.items())


def _idle(there: Mapping[str, int], plan: Plan) -> str:
    """Describe the devices without samples: paid for, but computing nothing."""
    busy = Counter(w.device_class for w in plan.workers if w.samples)
    idle = [
        f"{there[name] - busy[name]} of {there[name]} {name}"
        for name in sorted(there)
        if busy[name] < there[name]
    ]
    return f"without samples: {', '.join(idle)}" if idle else ""
