"""Comparison of all strategies by one cost model, each with the reason for losing."""

from __future__ import annotations

from pydantic import Field

from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.plan import (
    PASSING_STRATEGIES,
    STRATEGIES,
    compare_passes,
    explain_step_time,
    plan_in_passes,
)
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan, TokenRate, ZeroStage
from gpumix.schema.profile.profile import Profile
from gpumix.schema.value import Value


class HeadRoom(Value):
    """The least free memory at peak among the devices of one class."""

    device_class: str
    free_bytes: int
    part: float = Field(description="of what a plan may use of it")


class StrategyRow(Value):
    """Figures of a strategy's plan; without a plan, only `why`."""

    strategy: str
    step_s: float | None = None
    tokens_per_s: TokenRate | None = None
    zero_stage: ZeroStage | None = None
    head_room: tuple[HeadRoom, ...] = Field(
        default=(), description="classes by name; those that the plan leaves out are missing"
    )
    why: str = Field(description="why it lost, or that it won")


class Comparison(Value):
    """A row for each strategy, in the order of `plan.STRATEGIES`."""

    global_batch: int
    best: str = Field(description="the fastest; the first one of those that are equally fast")
    emulated: bool = False
    estimated: tuple[str, ...] = Field(
        default=(), description="device classes whose times are estimates from their datasheets"
    )
    rows: tuple[StrategyRow, ...]


def compare(profile: Profile, request: PlanRequest) -> Comparison:
    """Plan with every strategy. A batch that does not fit at once is taken in passes where trainers
    do so.

    Raises:
        InputError: the request or the profile does not fit any strategy.
        NoFeasiblePlanError: no strategy has a plan that fits.
    """
    plans: dict[str, Plan] = {}
    failures: dict[str, InputError | NoFeasiblePlanError] = {}
    for name, strategy in STRATEGIES.items():
        try:
            plans[name] = strategy(profile, request)
        except (InputError, NoFeasiblePlanError) as error:
            failures[name] = error
    if not plans:
        raise next(iter(failures.values()))
    best = min(plans, key=lambda name: get_prediction(plans[name]).step_s)
    rows = [
        _make_row(name, plans[name], plans[best], won=name == best)
        if name in plans
        else StrategyRow(strategy=name, why=failures[name].what)
        for name in STRATEGIES
    ]
    for number, name in enumerate(STRATEGIES):
        if name in failures and name in PASSING_STRATEGIES:
            found = plan_in_passes(name, profile, request)
            rows[number] = _make_row_in_passes(*found, plans[best]) if found else rows[number]
    return Comparison(
        global_batch=request.global_batch,
        best=best,
        emulated=profile.cluster.emulated,
        estimated=profile.estimated,
        rows=tuple(rows),
    )


def _make_row(name: str, plan: Plan, best: Plan, *, won: bool) -> StrategyRow:
    prediction = get_prediction(plan)
    return StrategyRow(
        strategy=name,
        step_s=prediction.step_s,
        tokens_per_s=prediction.tokens_per_s,
        zero_stage=plan.zero_stage,
        head_room=_find_least_free_memory(plan),
        why="the fastest" if won else explain_step_time(plan, best),
    )


def _make_row_in_passes(passes: int, part: Plan, best: Plan) -> StrategyRow:
    step_s, why = compare_passes(passes, part, best)
    return StrategyRow(
        strategy=part.strategy,
        step_s=step_s,
        tokens_per_s=get_prediction(part).tokens_per_s,
        zero_stage=part.zero_stage,
        head_room=_find_least_free_memory(part),
        why=why,
    )


def _find_least_free_memory(plan: Plan) -> tuple[HeadRoom, ...]:
    least: dict[str, HeadRoom] = {}
    for worker, expected in zip(plan.workers, get_prediction(plan).workers):
        name, limit = worker.device_class, expected.memory_limit_bytes
        free = limit - expected.peak_bytes
        if name not in least or free < least[name].free_bytes:
            part = free / limit if limit else 0.0
            least[name] = HeadRoom(device_class=name, free_bytes=free, part=part)
    return tuple(least[name] for name in sorted(least))
