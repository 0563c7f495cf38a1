"""Measurements of a rank's steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar, overload

from gpumix.hardware.device import DeviceRuntime
from gpumix.schema.plan.plan import Plan
from gpumix.train.run_log.metrics import (
    WARM_UP_STEPS,
    ComputedPart,
    RankSpeed,
    compute_median_s,
    speed_of,
)

T = TypeVar("T")
KEPT_STEPS = 1000


class NewestValues(Sequence[T]):
    """Values of all steps so far, by number, with only the newest kept: a run may take millions of
    steps. Slices leave out dropped values."""

    def __init__(self) -> None:
        self._kept: list[T] = []
        self._dropped = 0

    def append(self, value: T) -> None:
        self._kept.append(value)
        if len(self._kept) == 2 * KEPT_STEPS:
            del self._kept[:KEPT_STEPS]
            self._dropped += KEPT_STEPS

    def __len__(self) -> int:
        return self._dropped + len(self._kept)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            first, last = (max(0, one - self._dropped) for one in (begin, end))
            return self._kept[first:last:step]
        if 0 <= index < self._dropped:
            raise IndexError(f"value {index} is no longer kept")
        return self._kept[index if index < 0 else index - self._dropped]


class StepHistory:
    """Measurements of the steps since this rank began; statistics are of the newest at most.

    Attributes:
        times_s: by step.
        tokens: by step, of all ranks; `own_tokens` are this rank's, `parts` its computed fractions
            of the plan.
        losses: by step.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._overruns_before = 0
        self.times_s = NewestValues[float]()
        self.tokens = NewestValues[int]()
        self.own_tokens = NewestValues[int]()
        self.parts = NewestValues[ComputedPart]()
        self.losses = NewestValues[float]()

    def add(
        self, step_s: float, loss: float, tokens: int, own_tokens: int, part: ComputedPart
    ) -> None:
        self.times_s.append(step_s)
        self.losses.append(loss)
        self.tokens.append(tokens)
        self.own_tokens.append(own_tokens)
        self.parts.append(part)
        if len(self.times_s) == WARM_UP_STEPS:
            self._overruns_before = self._runtime.overruns

    @property
    def overruns(self) -> int:
        """Overruns of this rank in the steps counted for speed."""
        if len(self.times_s) < WARM_UP_STEPS:
            return 0
        return self._runtime.overruns - self._overruns_before

    def step_s(self, last: int) -> float:
        """Return the typical time of the last steps."""
        return compute_median_s(self.times_s[-last:])

    def speed(self, plan: Plan, rank: int, last: int) -> RankSpeed:
        """Return this rank's speed in the last steps."""
        tokens, part = fmean(self.own_tokens[-last:]), ComputedPart.mean(self.parts[-last:])
        return speed_of(plan, rank, self.step_s(last), tokens, part)
