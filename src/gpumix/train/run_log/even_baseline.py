"""Even split in the best setting, the baseline of a run's speed.

Its speed depends on the ZeRO stage and on activation checkpointing. Predictions are off by a few
per cent, so each setting that may be fastest within that error is tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumix.planner.common.strategy import PlanRequest, get_prediction

if TYPE_CHECKING:
    from gpumix.schema.job.job import Job
    from gpumix.schema.plan.plan import Plan
    from gpumix.schema.profile.profile import Profile
    from gpumix.train.controller import JobController
    from gpumix.train.run_log.summary import TrialResult

# A plan predicted slower than the fastest by more than this share is not tried.
PREDICTION_DOUBT_SHARE = 0.05
MOST_TRIED_PLANS = 3


@dataclass(frozen=True)
class EvenBaseline:
    """The fastest even plan, its trial, and the number of plans tried; `overruns` of all trials."""

    plan: Plan
    trial: TrialResult
    tried: int
    overruns: int

    @property
    def setting(self) -> str:
        """The fastest plan's setting, in a few words."""
        modes = {worker.mode.recompute for worker in self.plan.workers}
        kept = "recompute" if modes == {True} else "graphs kept"
        micro_batch = max(worker.micro_batch for worker in self.plan.workers)
        return f"ZeRO stage {self.plan.zero_stage}, {kept}, micro-batches of {micro_batch}"


def measure_best_even_plan(pipeline: JobController, profile: Profile, steps: int) -> EvenBaseline:
    """Try the possibly fastest even plans for `steps` steps each.

    Raises:
        NoFeasiblePlanError: no even split fits.
    """
    plans = select_even_plans(pipeline.job, profile)
    trials = [pipeline.try_out(plan, steps) for plan in plans]
    plan, trial = min(zip(plans, trials, strict=True), key=lambda tried: tried[1].step_s)
    return EvenBaseline(plan, trial, len(plans), sum(trial.overruns for trial in trials))


def select_even_plans(job: Job, profile: Profile) -> list[Plan]:
    """Return the possibly fastest even plans, best prediction first: at most one per ZeRO stage
    with activation checkpointing, and one without.

    Raises:
        NoFeasiblePlanError: no even split fits.
    """
    from gpumix.planner.baselines import even

    space = job.space.with_all_devices()
    request = PlanRequest(global_batch=job.global_batch_size, space=space)
    found: dict[tuple[int, bool], Plan] = {}
    for plan in even.iterate_even_plans(profile, request):
        first = next(iter(found.values()), plan)
        if (
            get_prediction(plan).step_s
            > (1 + PREDICTION_DOUBT_SHARE) * get_prediction(first).step_s
        ):
            break
        found.setdefault((plan.zero_stage, plan.workers[0].mode.recompute), plan)
    return list(found.values())[:MOST_TRIED_PLANS]
