"""What the steps of one rank took, and what they worked on."""

from __future__ import annotations

from statistics import fmean

from gpumix.hardware.device import DeviceRuntime
from gpumix.spec.plan import Plan
from gpumix.train.metrics import WARM_UP_STEPS, Part, Speed, speed_of, typical_s


class StepsTaken:
    """Of the steps since this rank began.

    Attributes:
        times_s: of each.
        tokens: of each, of all ranks; `own_tokens` are those of this rank, `parts` what it computed
            of its plan.
        losses: of each.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._overruns_before = 0
        self.times_s: list[float] = []
        self.tokens: list[int] = []
        self.own_tokens: list[int] = []
        self.parts: list[Part] = []
        self.losses: list[float] = []

    def add(self, step_s: float, loss: float, tokens: int, own_tokens: int, part: Part) -> None:
        self.times_s.append(step_s)
        self.losses.append(loss)
        self.tokens.append(tokens)
        self.own_tokens.append(own_tokens)
        self.parts.append(part)
        if len(self.times_s) == WARM_UP_STEPS:
            self._overruns_before = self._runtime.overruns

    @property
    def counting(self) -> int:
        """How many steps count for the speed: those after the warm-up, all if there are no more."""
        return len(self.times_s[WARM_UP_STEPS:]) or len(self.times_s)

    @property
    def overruns(self) -> int:
        """Of this rank, in those steps that count for speed."""
        if len(self.times_s) < WARM_UP_STEPS:
            return 0
        return self._runtime.overruns - self._overruns_before

    def step_s(self, last: int) -> float:
        """A typical one of the last steps."""
        return typical_s(self.times_s[-last:])

    def tokens_per_s(self, last: int) -> float:
        """Of all ranks, in the last steps; 0 of none."""
        step_s = self.step_s(last)
        return fmean(self.tokens[-last:]) / step_s if step_s else 0.0

    def speed(self, plan: Plan, rank: int, last: int) -> Speed:
        """This rank's, in the last steps."""
        tokens, part = fmean(self.own_tokens[-last:]), Part.mean(self.parts[-last:])
        return speed_of(plan, rank, self.step_s(last), tokens, part)
