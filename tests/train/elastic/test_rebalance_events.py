"""What is told of a split anew: that it was made, why, and what came of it, whatever comes next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.elastic.rebalancer import WINDOW_STEPS
from gpumix.train.rebalance_controller import FIRST_STEPS, MEASURED_STEPS, RebalanceController
from gpumix.train.run_log.metrics import RunEvent


class Run:
    """Two devices that a plan has as equals; a step takes as long as the slower one."""

    def __init__(self, **settings: Any) -> None:
        workers = tuple(
            Worker(device=f"d{n}", device_class="c", samples=8, micro_batch=1, state_share=0.5)
            for n in (0, 1)
        )
        plan = Plan(
            strategy="by hand",
            model="m",
            sequence_length=8,
            global_batch=16,
            stages=(Stage(units=("unit",), workers=workers),),
        )
        context: Any = SimpleNamespace(
            job=SimpleNamespace(max_steps=100),
            runtime=SimpleNamespace(peak_bytes=lambda: None),
            ranks=SimpleNamespace(gather=lambda what, own: [own, own]),
        )
        self.balancing = RebalanceController(plan, None, context, state_moves=False, **settings)
        self.sample_s = [1.0, 1.0]
        self.times: list[float] = []
        self._before = [0.0, 0.0]

    def steps(self, most: int) -> list[RunEvent]:
        """What is told first, within so many steps."""
        for _ in range(most):
            samples = [worker.samples for worker in self.balancing.plan.workers]
            seconds = [n * s for n, s in zip(samples, self.sample_s)]
            self.times.append(max(seconds))
            told = self.balancing.after_step(self.times, self._before)
            self._before = seconds
            if told:
                return told
        return []


@pytest.fixture
def run():
    """A device has become slow, and the samples were split anew."""
    run = Run()
    run.steps(FIRST_STEPS + 2)
    run.sample_s[1] = 3.0
    (told,) = run.steps(2 * WINDOW_STEPS)
    assert told.event == "plan"
    return run


def test_what_a_change_came_to_is_told_when_enough_steps_tell(run):
    (told,) = run.steps(MEASURED_STEPS)
    steps = {"step_s": 12.0, "step_before_s": 24.0, "steps": MEASURED_STEPS - 1}
    assert (told.event, told.fields) == ("rebalanced", steps)
    assert run.balancing.effect(run.times) == []


def test_what_a_change_came_to_is_told_before_the_next_one(run):
    run.sample_s[1] = 1.0
    effect, undone = run.steps(MEASURED_STEPS)
    assert (effect.event, effect.fields["step_s"]) == ("rebalanced", 12.0)
    assert effect.fields["steps"] < MEASURED_STEPS
    assert (undone.event, undone.fields["samples"]) == ("plan", {"d0": 8, "d1": 8})
    assert "is undone: by it steps took 12.00 s instead of 8.00 s" in undone.fields["why"]
    (told,) = run.steps(MEASURED_STEPS)  # of the undoing
    assert (told.event, told.fields["step_s"]) == ("rebalanced", 8.0)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_at_the_end_of_a_run_it_is_told_by_the_steps_that_there_were(run, steps):
    run.times += [12.0] * steps
    told = [(one.event, one.fields["steps"]) for one in run.balancing.effect(run.times)]
    assert told == ([("rebalanced", 1)] if steps else [])


def test_so_is_what_another_plan_came_to():
    run = Run(step_before_s=99.0)
    run.steps(FIRST_STEPS + 1)
    (told,) = run.balancing.effect(run.times)
    assert told.fields == {"step_s": 8.0, "step_before_s": 99.0, "steps": 1}
