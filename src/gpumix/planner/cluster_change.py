"""The worth of changes to a cluster: the fastest plan of each, compared with today's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import Field

from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.optimal import plan_fastest
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan, TokenRate
from gpumix.schema.profile.profile import Profile
from gpumix.schema.value import Value

SECONDS_PER_HOUR = 3600.0
BILLION = 1e9


class ClusterForecast(Value):
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


def forecast_clusters(
    variants: Sequence[tuple[str, Profile]],
    request: PlanRequest,
    prices: Mapping[str, float] | None = None,
) -> list[ClusterForecast]:
    """Find the fastest plan of each variant, of any number of stages, and compare with the first.

    Args:
        prices: price of one device of each class per hour, in any currency; all devices of a
            cluster are paid for, also idle ones.

    Raises:
        InputError: a class has no price.
    """
    found: list[ClusterForecast] = []
    for name, profile in variants:
        found.append(_forecast_cluster(name, profile, request, prices, found[0] if found else None))
    return found


def _forecast_cluster(
    change: str,
    profile: Profile,
    request: PlanRequest,
    prices: Mapping[str, float] | None,
    first: ClusterForecast | None,
) -> ClusterForecast:
    there = Counter(d.device_class for d in profile.cluster.devices)
    hourly = None if prices is None else _compute_hourly_price(there, prices)
    cluster = ClusterForecast(
        change=change,
        devices=dict(there),
        price_per_hour=hourly,
        emulated=profile.cluster.emulated,
        estimated=profile.estimated,
    )
    try:
        plan = plan_fastest(profile, request)
    except NoFeasiblePlanError as error:
        return cluster.model_copy(update={"why": error.what})
    speed = get_prediction(plan).tokens_per_s
    paid = None if hourly is None else hourly / SECONDS_PER_HOUR / speed * BILLION
    return cluster.model_copy(
        update={
            "step_s": get_prediction(plan).step_s,
            "tokens_per_s": speed,
            "worth": None if first is None else _compute_gain(speed, first.tokens_per_s),
            "price_per_billion_tokens": paid,
            "why": _describe_idle_devices(there, plan),
        }
    )


def _compute_gain(speed: float, before: float | None) -> float | None:
    """Return the fraction gained; None if the speed before is unknown or a step took no time."""
    return None if before is None or before == float("inf") else speed / before - 1.0


def _compute_hourly_price(there: Mapping[str, int], prices: Mapping[str, float]) -> float:
    missing = sorted(set(there) - set(prices))
    if missing:
        raise InputError(
            f"class '{missing[0]}' has no price",
            code="price-missing",
            where="--price",
            fix=f"give the price of a device for an hour: --price {missing[0]}=0.35",
        )
    return sum(count * prices[name] for name, count in there.items())


def _describe_idle_devices(there: Mapping[str, int], plan: Plan) -> str:
    """Describe the devices without samples: paid for, but computing nothing."""
    busy = Counter(w.device_class for w in plan.workers if w.samples)
    idle = [
        f"{there[name] - busy[name]} of {there[name]} {name}"
        for name in sorted(there)
        if busy[name] < there[name]
    ]
    return f"without samples: {', '.join(idle)}" if idle else ""
