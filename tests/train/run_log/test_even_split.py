"""The even split that a run is compared with is the fastest of those that are tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from gpumix.planner.common.strategy import get_prediction
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.train.run_log.even_baseline import (
    MOST_TRIED_PLANS,
    PREDICTION_DOUBT_SHARE,
    measure_best_even_plan,
    select_even_plans,
)
from helpers.errors import raises
from helpers.plans.profiles import GIB, Card, block, line, profile, steady

CARDS = [Card("fast", 1, GIB, steady(4.0)), Card("slow", 1, GIB, steady(1.0))]


def job(**techniques):
    return SimpleNamespace(global_batch_size=8, space=Space(**techniques))


@dataclass
class Pipeline:
    """Trials take the seconds that are given, in this order."""

    job: SimpleNamespace
    seconds: list[float]
    plans: list = field(default_factory=list)

    def try_out(self, plan, steps):
        self.plans.append(plan)
        return SimpleNamespace(step_s=self.seconds[len(self.plans) - 1], overruns=1, steps=steps)


def test_settings_that_may_be_the_fastest_are_planned_once_each():
    plans = select_even_plans(job(), profile(CARDS))
    settings = [(plan.zero_stage, plan.workers[0].mode.recompute) for plan in plans]
    assert 1 < len(plans) <= MOST_TRIED_PLANS
    assert len(set(settings)) == len(plans)
    assert {plan.strategy for plan in plans} == {"even"}
    times = [get_prediction(plan).step_s for plan in plans]
    assert times == sorted(times)
    assert times[-1] <= (1 + PREDICTION_DOUBT_SHARE) * times[0]


def test_only_techniques_of_the_job_are_tried():
    (plan,) = select_even_plans(job(zero_stages=3, gradient_checkpointing=True), profile(CARDS))
    assert (plan.zero_stage, plan.workers[0].mode.recompute) == (3, True)


def test_the_fastest_trial_counts_and_not_the_best_prediction():
    measured = profile(CARDS)
    plans = select_even_plans(job(), measured)
    pipeline = Pipeline(job(), [3.0, 1.0, 2.0])
    found = measure_best_even_plan(pipeline, measured, steps=4)
    assert pipeline.plans == plans
    assert (found.plan, found.trial.step_s, found.trial.steps) == (plans[1], 1.0, 4)
    assert (found.tried, found.overruns) == (len(plans), len(plans))
    kept = "recompute" if plans[1].workers[0].mode.recompute else "graphs kept"
    assert found.setting == f"ZeRO stage {plans[1].zero_stage}, {kept}, micro-batches of 4"


def test_an_even_split_that_does_not_fit_is_refused():
    cards = [CARDS[0], Card("small", 1, 50_000, steady(1.0))]
    small = profile(cards, kinds=[block(trainable=1000, backward=line(1000))])
    with raises(NoFeasiblePlanError, code="policy-does-not-fit", what="small"):
        measure_best_even_plan(Pipeline(job(), []), small, steps=4)
