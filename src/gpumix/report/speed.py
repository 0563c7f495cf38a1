"""Speed of a run, against an even split and against the sum of its devices' individual speeds.

Each speed is marked as measured or predicted. All speeds count the same tokens per step, so ratios
of speeds equal ratios of step times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumix.cost.device_alone import compute_ideal_tokens_per_s
from gpumix.report.run import Run
from gpumix.train.run_figures.history import HistoryEvent

EVEN = "even"

Source = Literal["measured", "predicted"]


@dataclass(frozen=True)
class StepSpeed:
    """Speed of a step; unknown without `step_s`, for the reason `why`."""

    step_s: float | None = None
    tokens_per_s: float | None = None
    source: Source = "predicted"
    why: str = ""

    def __bool__(self) -> bool:
        return bool(self.step_s)


@dataclass(frozen=True)
class RunSpeeds:
    """Speeds of a run as `measured` and `predicted`, of an `even` split, and the `ideal`: the sum
    of all devices' individual speeds."""

    measured: StepSpeed
    predicted: StepSpeed
    even: StepSpeed
    ideal: StepSpeed

    @property
    def best(self) -> StepSpeed:
        """The best known speed of the run."""
        return self.measured or self.predicted

    @property
    def comparable_to_even(self) -> StepSpeed:
        """The run's speed comparable to the even split's: two predictions share their error, for
        example on a busy machine, while a prediction against a measurement includes it."""
        return self.measured if self.even.source == "measured" else self.predicted or self.measured

    @property
    def speedup_over_even(self) -> float | None:
        """Speedup over the even split."""
        return _compute_speedup(self.comparable_to_even, self.even)

    @property
    def fraction_of_ideal(self) -> float | None:
        """Fraction of the ideal speed."""
        return _compute_speedup(self.best, self.ideal)


def _compute_speedup(one: StepSpeed, other: StepSpeed) -> float | None:
    if not one.step_s or not other.step_s:
        return None
    return other.step_s / one.step_s


def compute_run_speeds(run: Run) -> RunSpeeds:
    figures, expected = run.figures, run.plan.prediction
    tokens = figures.step_tokens or float(run.plan.global_batch * run.plan.sequence_length)
    return RunSpeeds(
        measured=_speed(figures.step_s, tokens, "measured", "no step is done yet"),
        predicted=_speed(
            None if expected is None else expected.step_s,
            tokens,
            "predicted",
            "the plan has no prediction",
        ),
        even=_even(run, tokens),
        ideal=_ideal(run, tokens),
    )


def _speed(step_s: float | None, tokens: float, source: Source, why: str) -> StepSpeed:
    if not step_s:
        return StepSpeed(source=source, why=why)
    return StepSpeed(step_s, tokens / step_s, source)


def _even(run: Run, tokens: float) -> StepSpeed:
    """Return the even split's speed: measured as in the demo, or predicted with the plan."""
    measured = [one for one in run.history.events if is_comparison_with(one, EVEN)]
    if measured:
        return _speed(measured[-1].number("step_s"), tokens, "measured", "")
    if run.plan.strategy == EVEN:
        return StepSpeed(why="this plan is the even split")
    reasons = run.plan.reasons
    found = [a for a in reasons.alternatives if a.strategy == EVEN] if reasons else []
    if not found:
        return StepSpeed(why="the plan was not compared with it")
    return _speed(found[0].step_s, tokens, "predicted", f"not possible: {found[0].why}")


def is_comparison_with(one: HistoryEvent, strategy: str) -> bool:
    """Return whether an event reports another strategy's measured speed on the same devices."""
    known = one.event == "compared" and one.text("strategy") == strategy
    return known and bool(one.number("step_s"))


def _ideal(run: Run, tokens: float) -> StepSpeed:
    profile = run.profile
    if profile is None:
        return StepSpeed(why="the folder has no profile of the devices")
    alone = compute_ideal_tokens_per_s(profile, (d.device_class for d in profile.cluster.devices))
    step_s = run.plan.global_batch * run.plan.sequence_length / alone if alone else None
    return _speed(step_s, tokens, "predicted", "")
