"""The answer first: how fast, against an even split, and against what devices reach alone.

Each speed says whether it was measured or predicted, and is of the same number of tokens a step, so
that speeds compare as step times do.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from gpumix.cost.alone import ideal_tokens_per_s
from gpumix.report.history import Happened
from gpumix.report.run import Run

EVEN = "even"

Source = Literal["measured", "predicted"]


@dataclass(frozen=True)
class Speed:
    """Of a step; not known where there is no `step_s`, and `why` says why."""

    step_s: float | None = None
    tokens_per_s: float | None = None
    source: Source = "predicted"
    why: str = ""

    def __bool__(self) -> bool:
        return bool(self.step_s)


@dataclass(frozen=True)
class Answer:
    """The run's speed as `measured`, as `predicted`, that of an `even` split, and the `ideal`: what
    all devices reach alone, added up."""

    measured: Speed
    predicted: Speed
    even: Speed
    ideal: Speed

    @property
    def best(self) -> Speed:
        """What is known best of the run."""
        return self.measured or self.predicted

    @property
    def like_even(self) -> Speed:
        """The run's speed that compares with that of the even split: predictions of both are off
        alike, as on a busy machine, where one against a measured time tells of the machine."""
        return self.measured if self.even.source == "measured" else self.predicted or self.measured

    @property
    def against_even(self) -> float | None:
        """How many times as fast."""
        return _times(self.like_even, self.even)

    @property
    def of_ideal(self) -> float | None:
        """Which part of it."""
        return _times(self.best, self.ideal)

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured step time, less 1, as the run itself tells it."""
        if not self.measured.step_s or not self.predicted.step_s:
            return None
        return self.predicted.step_s / self.measured.step_s - 1


def _times(one: Speed, other: Speed) -> float | None:
    if not one.step_s or not other.step_s:
        return None
    return other.step_s / one.step_s


def answer_of(run: Run) -> Answer:
    tokens = _tokens_of_step(run)
    step_s = run.history.step_s
    expected = run.plan.prediction
    return Answer(
        measured=_speed(step_s, tokens, "measured", "no step was done yet"),
        predicted=_speed(
            None if expected is None else expected.step_s,
            tokens,
            "predicted",
            "the plan holds no prediction",
        ),
        even=_even(run, tokens),
        ideal=_ideal(run, tokens),
    )


def _tokens_of_step(run: Run) -> float:
    """Without padding where steps were done, and so it is known."""
    counted = run.history.counted()
    if counted:
        return fmean(one.tokens_per_s * one.step_s for one in counted)
    return float(run.plan.global_batch * run.plan.sequence_length)


def _speed(step_s: float | None, tokens: float, source: Source, why: str) -> Speed:
    if not step_s:
        return Speed(source=source, why=why)
    return Speed(step_s, tokens / step_s, source)


def _even(run: Run, tokens: float) -> Speed:
    """Measured where the run did so, as the demo does; else as the plan was weighed against it."""
    measured = [one for one in run.history.events if compared_with(one, EVEN)]
    if measured:
        return _speed(measured[-1].number("step_s"), tokens, "measured", "")
    if run.plan.strategy == EVEN:
        return Speed(why="this plan is the even split")
    reasons = run.plan.reasons
    found = [a for a in reasons.alternatives if a.strategy == EVEN] if reasons else []
    if not found:
        return Speed(why="the plan was not weighed against it")
    return _speed(found[0].step_s, tokens, "predicted", f"not possible: {found[0].why}")


def compared_with(one: Happened, strategy: str) -> bool:
    """Whether an event tells how fast another strategy was, measured on the same devices."""
    known = one.event == "compared" and one.text("strategy") == strategy
    return known and bool(one.number("step_s"))


def _ideal(run: Run, tokens: float) -> Speed:
    profile = run.profile
    if profile is None:
        return Speed(why="what the devices were measured to do is not in the folder")
    alone = ideal_tokens_per_s(profile, (d.device_class for d in profile.cluster.devices))
    step_s = run.plan.global_batch * run.plan.sequence_length / alone if alone else None
    return _speed(step_s, tokens, "predicted", "")
