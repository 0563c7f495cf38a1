"""Step counter of a function, by its optimizer's steps; ends the function after enough steps.

The first steps do not count: allocators and caches fill, workers start, and code is compiled.
Batches prefetched by workers meanwhile would also distort the measured loading speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from weakref import ref

from gpumix.doctor.function.observations import WindowLength
from gpumix.doctor.function.watching.optimizers import ParameterReferences, list_parameters
from gpumix.hardware import runtime

LEAST_STEPS = 3  # counted steps required for a result
MOST_STEPS = 400
UNSETTLED_S = 5.0  # limit on waiting for steps to settle


class WindowDone(BaseException):
    """Signal that all requested steps are done; no `Exception`, which training code may catch."""


class _CountedOptimizer:
    """The optimizer whose steps count, or its successor.

    An optimizer for the same parameters succeeds it, even while it is alive: cycles of references
    may keep it. Once it is gone, so does any other optimizer: at once if its parameters are gone,
    too, otherwise with the second step, since the first may precede the step of a successor.
    """

    def __init__(self) -> None:
        self._optimizer: Callable[[], Any] = lambda: None
        self._parameters: ParameterReferences | None = None
        self._others: list[ParameterReferences] = []  # stepped since its last step

    def counts(self, optimizer: Any) -> bool:
        """Return whether this step of `optimizer` counts."""
        if self._optimizer() is not optimizer:
            if not self._is_succeeded_by(optimizer):
                return False
            self._optimizer, self._parameters = ref(optimizer), ParameterReferences(optimizer)
        self._others.clear()
        return True

    def _is_succeeded_by(self, optimizer: Any) -> bool:
        parameters = list_parameters(optimizer.param_groups)
        if self._parameters is None or self._parameters.match(parameters):
            return True
        if self._optimizer() is not None:
            return False
        if not self._parameters.alive or any(one.match(parameters) for one in self._others):
            return True
        self._others = [one for one in self._others if one.alive]
        self._others.append(ParameterReferences(optimizer))
        return False


class StepCounter:
    """Steps of the first optimizer to step; steps of further optimizers belong to its steps.

    Args:
        length: number of uncounted, counted and subsequent profiled steps; at most `MOST_STEPS` are
            counted to reach its minimal seconds.
        settled: called after each step past the warm-up, which continues until True is returned.
        each: called at the end of each step, counted or not.
        begins: called at the start of the first counted step; `ends` after the last.
        leaves: called after the last step. Then `WindowDone` is raised; if the function catches it,
            the process exits at the next step.
    """

    def __init__(
        self,
        length: WindowLength,
        *,
        settled: Callable[[], bool] = lambda: True,
        each: Callable[[], None] = lambda: None,
        begins: Callable[[], None],
        ends: Callable[[], None],
        leaves: Callable[[], None],
    ) -> None:
        self._length, self._settled, self._each = length, settled, each
        self._profiled = length.profiled  # steps left
        self._begins, self._ends, self._leaves = begins, ends, leaves
        self._owner = _CountedOptimizer()
        self._warm_s = self._begun_s = self._step_s = 0.0
        self._begun = self._ended = self._left = False
        self.done = 0
        """Number of steps so far, counted or not."""
        self.seconds = 0.0
        """Seconds of the counted steps."""

        self.counted = 0
        """Number of counted steps."""

    def step(self, optimizer: Any, *_: Any) -> None:
        """Handle a step of any optimizer; an optimizer hook of torch."""
        if self._left:
            os._exit(0)
        if not self._owner.counts(optimizer):
            return
        self.done += 1
        self._each()
        if self._ended:
            self._profiled -= 1
        elif self._begun:
            self.counted += 1
            self._end_if_enough()
        elif self.done >= self._length.warm_up and self._is_warm():
            wait_for_gpu()
            self._begun = True
            self._begins()
            self._begun_s = time.perf_counter()
        if self._ended and self._profiled <= 0:
            self._left = True
            self._leaves()
            raise WindowDone
        self._step_s = time.perf_counter()

    def _is_warm(self) -> bool:
        """Return whether following steps are representative, as far as worth waiting for."""
        self._warm_s = self._warm_s or time.perf_counter()
        return self._settled() or time.perf_counter() - self._warm_s > UNSETTLED_S

    def _end_if_enough(self) -> None:
        long = time.perf_counter() - self._begun_s >= self._length.least_s
        if self.counted < self._length.steps or not (long or self.counted >= MOST_STEPS):
            return
        wait_for_gpu()
        self.seconds = time.perf_counter() - self._begun_s
        self._ended = True
        self._ends()

    def end_early(self) -> bool:
        """Handle the function's own end; return whether enough steps were counted."""
        if self._ended:
            return True
        if self.counted < LEAST_STEPS:
            return False
        self.seconds = self._step_s - self._begun_s
        self._ends()
        return True


def wait_for_gpu() -> None:
    """Wait until all work submitted to the GPU is done."""
    if runtime.is_initialized():
        runtime.synchronize()
