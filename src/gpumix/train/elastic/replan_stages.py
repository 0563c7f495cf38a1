"""Changes of a multi-stage plan when device times differ from the prediction.

Workers of a stage can exchange micro-batches between steps (`rebalance_stages`). Units cannot
change stages while a run trains: new stages cost a restart from the state of the present step, some
seconds in all. Pure, except for the given planner: all ranks see equal times and reach the same
decision in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from gpumix.cost.predict import predict
from gpumix.hardware.estimates.what_if import with_slower
from gpumix.planner.common.strategy import restore_device_classes
from gpumix.schema.errors import PlanOutdated
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import show_seconds
from gpumix.train.elastic.device_pace import with_samples_in
from gpumix.train.elastic.rebalance_stages import list_samples_by_stage, redeal_micro_batches

# Factor by which a device is slower or faster than the others, against the plan, in each of
# WINDOW_STEPS steps.
CLEAR_FACTOR = 1.2
WINDOW_STEPS = 8
# Each change while the run trains doubles the window, up to this.
MOST_WINDOW_STEPS = 64
# Least gain of a new plan, and of the remaining steps in multiples of the time of a restart.
LEAST_GAIN = 0.1
WORTH = 2.0
RESTART_S = 10.0
# Deviations are examined again once they differ by this factor.
REEXAMINE_FACTOR = 1.1


@dataclass(frozen=True)
class MicroBatchExchange:
    """Plan of the next step, with micro-batches exchanged within stages, and the reason. Times are
    per step."""

    plan: Plan
    before_s: float
    after_s: float
    why: str


class StageReplanner:
    """Decisions by the compute times of ranks, step by step.

    Args:
        plan: of several stages, made from `profile`.
        replan: makes a plan for another profile; None: the run does not restart.
        steps: total number of steps.
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        *,
        replan: Callable[[Profile], Plan] | None,
        steps: int,
    ) -> None:
        self._profile = profile
        self._replan = replan
        self._left = steps
        self._seen: dict[str, float] = {}
        self._dealt = False  # by times unlike the profile's
        self._window = WINDOW_STEPS
        self._go_on(plan)
        self._of_before = False

    def _go_on(self, plan: Plan) -> None:
        self._plan = plan
        told = plan.prediction.workers if plan.prediction is not None else ()
        busy_s = {worker.device: worker.busy_s for worker in told}
        self._planned_s = [busy_s.get(worker.device, 0.0) for worker in plan.workers]
        self._factors: deque[list[float]] = deque(maxlen=self._window)
        self._of_before = True  # the next times are of the step before the change

    def observe(self, compute_s: Sequence[float]) -> MicroBatchExchange | PlanOutdated | None:
        """Record the compute times of the step before this one; return the plan from the next step
        on, or the error to raise if another plan is worth a restart.

        Args:
            compute_s: in the order of the plan's workers; 0 for a step that does not count.
        """
        self._left -= 1
        of_before, self._of_before = self._of_before, False
        if of_before:
            return None
        working = [n for n, planned_s in enumerate(self._planned_s) if planned_s > 0]
        if len(working) < 2 or not all(compute_s[n] > 0 for n in working):
            return None
        longer = [compute_s[n] / self._planned_s[n] for n in working]
        usual = median(longer)
        self._factors.append([factor / usual for factor in longer])
        if len(self._factors) < self._window:
            return None
        devices = [self._plan.workers[n].device for n in working]
        factors = {
            device: factor
            for device, of_steps in zip(devices, zip(*self._factors), strict=True)
            if (factor := _get_lasting_factor(of_steps)) != 1.0
        }
        if _alike(factors, self._seen) or (not factors and not self._dealt):
            return None
        self._seen = factors
        return self._choose_change(factors, usual)

    def _choose_change(
        self, factors: Mapping[str, float], usual: float
    ) -> MicroBatchExchange | PlanOutdated | None:
        profile = with_slower(self._profile, factors)
        now = _relabelled(self._plan, profile)
        now = now.model_copy(update={"prediction": predict(profile, now)})
        dealt = redeal_micro_batches(profile, now)
        before_s, still_s = _step_s(now), _step_s(dealt or now)
        new_s = still_s
        if self._replan is not None:
            new_s = _step_s(self._replan(profile))
        why = _describe_deviation(factors)
        gained_s = usual * (still_s - new_s) * self._left
        if new_s <= still_s * (1.0 - LEAST_GAIN) and gained_s >= WORTH * RESTART_S:
            return PlanOutdated(
                f"{why}: by another one a step is to take {show_seconds(usual * new_s)} instead of "
                f"{show_seconds(usual * before_s)}",
                code="plan-outdated",
                slower=dict(factors),
            )
        if dealt is None or still_s > before_s * (1.0 - LEAST_GAIN):
            return None
        self._dealt = bool(factors)
        self._window = min(2 * self._window, MOST_WINDOW_STEPS)
        plan = with_samples_in(self._plan, list_samples_by_stage(dealt))
        self._go_on(plan.model_copy(update={"prediction": predict(self._profile, plan)}))
        return MicroBatchExchange(self._plan, usual * before_s, usual * still_s, why)


def _step_s(plan: Plan) -> float:
    return plan.prediction.step_s if plan.prediction is not None else inf


def _describe_deviation(factors: Mapping[str, float]) -> str:
    """Describe the device deviating most from the rest."""
    if not factors:
        return "all devices are as fast against each other as planned again"
    worst = max(factors, key=lambda device: max(factors[device], 1.0 / factors[device]))
    return (
        f"device '{worst}' takes {factors[worst]:.2f} times as long as the others, against the plan"
    )


def _get_lasting_factor(factors: Sequence[float]) -> float:
    """Return the smallest deviation of all steps; 1 if small."""
    if min(factors) >= CLEAR_FACTOR:
        return min(factors)
    return max(factors) if max(factors) <= 1.0 / CLEAR_FACTOR else 1.0


def _alike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        1.0 / REEXAMINE_FACTOR < one[device] / other[device] < REEXAMINE_FACTOR for device in one
    )


def _relabelled(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with the device classes of a profile, without a prediction."""
    relabelled = restore_device_classes(profile.cluster, plan)
    return relabelled.model_copy(update={"prediction": None, "reasons": None})
