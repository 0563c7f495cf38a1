"""Whether a plan of several stages is to be made anew: devices take other times than it says.

Which units a stage has cannot change while a run trains, so that costs a start: from the state of
this very step, some seconds in all. Pure, but for the planner that is given: all ranks see the same
times and come to the same in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from gpumix.cost.predict import predict
from gpumix.hardware.whatif import with_slower
from gpumix.spec.errors import PlanOutdated
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.units import show_seconds

# A device takes so much longer than the others, against the plan, in each of so many steps; or as
# much less long.
CLEARLY = 1.2
WINDOW_STEPS = 8
# A new plan is to take so much less time, and the steps that are left to gain so many times what a
# start takes.
LEAST_GAIN = 0.1
WORTH = 2.0
START_S = 10.0
# What was looked into is not again, until it differs so much.
AGAIN = 1.1


class Restaging:
    """Watches how long ranks compute, step after step.

    Args:
        plan: of several stages; `profile` is what it was made from.
        replan: makes a plan for another profile.
        steps: how many there are to be.
    """

    def __init__(
        self, plan: Plan, profile: Profile, *, replan: Callable[[Profile], Plan], steps: int
    ) -> None:
        self._plan = plan
        self._profile = profile
        self._replan = replan
        self._left = steps
        told = plan.prediction.workers if plan.prediction is not None else ()
        busy_s = {worker.device: worker.busy_s for worker in told}
        self._planned_s = [busy_s.get(worker.device, 0.0) for worker in plan.workers]
        self._factors: deque[list[float]] = deque(maxlen=WINDOW_STEPS)
        self._seen: dict[str, float] = {}

    def observe(self, compute_s: Sequence[float]) -> PlanOutdated | None:
        """Take in how long each rank computed in a step: what to raise if a new plan is worth it.

        Args:
            compute_s: in the order of the plan's workers; 0 for a step that does not count.
        """
        self._left -= 1
        working = [n for n, planned_s in enumerate(self._planned_s) if planned_s > 0]
        if len(working) < 2 or not all(compute_s[n] > 0 for n in working):
            return None
        longer = [compute_s[n] / self._planned_s[n] for n in working]
        usual = median(longer)
        self._factors.append([factor / usual for factor in longer])
        if len(self._factors) < WINDOW_STEPS:
            return None
        devices = [self._plan.workers[n].device for n in working]
        factors = {
            device: factor
            for device, of_steps in zip(devices, zip(*self._factors), strict=True)
            if (factor := _lasting(of_steps)) != 1.0
        }
        if not factors or _alike(factors, self._seen):
            return None
        self._seen = factors
        return self._judged(factors, usual)

    def _judged(self, factors: Mapping[str, float], usual: float) -> PlanOutdated | None:
        profile = with_slower(self._profile, factors)
        new, now = self._replan(profile), _relabelled(self._plan, profile)
        if new.prediction is None:
            return None
        now_s, new_s = usual * predict(profile, now).step_s, usual * new.prediction.step_s
        gained_s = (now_s - new_s) * self._left
        if new_s > now_s * (1.0 - LEAST_GAIN) or gained_s < WORTH * START_S:
            return None
        worst = max(factors, key=lambda device: max(factors[device], 1.0 / factors[device]))
        return PlanOutdated(
            f"device '{worst}' takes {factors[worst]:.2f} times as long as the others, against the "
            f"plan: by another one a step is to take {show_seconds(new_s)} instead of "
            f"{show_seconds(now_s)}",
            slower=dict(factors),
        )


def _lasting(factors: Sequence[float]) -> float:
    """The least that all of them say; 1 if that is little."""
    if min(factors) >= CLEARLY:
        return min(factors)
    return max(factors) if max(factors) <= 1.0 / CLEARLY else 1.0


def _alike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        1.0 / AGAIN < one[device] / other[device] < AGAIN for device in one
    )


def _relabelled(plan: Plan, profile: Profile) -> Plan:
    """The plan with the classes that its devices have in a profile."""
    classes = {device.id: device.device_class for device in profile.cluster.devices}
    stages = tuple(
        stage.model_copy(
            update={
                "workers": tuple(
                    worker.model_copy(update={"device_class": classes[worker.device]})
                    for worker in stage.workers
                )
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages, "prediction": None, "reasons": None})
