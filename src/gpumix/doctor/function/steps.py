"""Counts a function's steps by those of its optimizer, and ends the function when there are enough.

The first steps do not count: allocators and caches fill, workers start, code is compiled; and what
workers read ahead meanwhile is no measure of how fast they read.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from gpumix.hardware import runtime

LEAST = 3  # counted steps that say something
MOST_STEPS = 400
UNSETTLED_S = 5.0  # that steps are waited for to become alike


class Enough(BaseException):
    """The steps that were wanted are done. No `Exception`, which training code may catch."""


class Steps:
    """The steps of the optimizer that steps first: one that steps beside it is part of its steps.

    Args:
        warm_up, steps, profiled: how many are not counted, are counted, and come behind these.
        least_s: seconds of those that are counted: of short ones there are more, `MOST_STEPS` at
            most.
        settled: asked after each step behind the warm-up, which goes on until it says so.
        begins: called when the first counted step begins, and `ends` when the last one is done.
        leaves: called when no more is wanted; then `Enough` is raised, or, where that was caught,
            the process ended.
    """

    def __init__(
        self,
        warm_up: int,
        steps: int,
        profiled: int,
        *,
        least_s: float = 0.0,
        settled: Callable[[], bool] = lambda: True,
        begins: Callable[[], None],
        ends: Callable[[], None],
        leaves: Callable[[], None],
    ) -> None:
        self._first, self._steps, self._profiled = warm_up, steps, profiled
        self._least_s, self._settled = least_s, settled
        self._begins, self._ends, self._leaves = begins, ends, leaves
        self._owner: Callable[[], Any] = lambda: None
        self._warm_s = self._begun_s = self._step_s = 0.0
        self._begun = self._ended = self._left = False
        self.done = 0
        """All steps so far."""
        self.seconds = 0.0
        """Of those that were counted."""

        self.counted = 0
        """How many those are."""

    def step(self, optimizer: Any, *_: Any) -> None:
        """One more, of some optimizer; a hook of torch's."""
        if self._left:
            os._exit(0)
        if self._owner() is None:
            self._owner = weakref.ref(optimizer)
        if self._owner() is not optimizer:
            return
        self.done += 1
        if self._ended:
            self._profiled -= 1
        elif self._begun:
            self.counted += 1
            self._end_if_enough()
        elif self.done >= self._first and self._warm():
            wait_for_gpu()
            self._begun = True
            self._begins()
            self._begun_s = time.perf_counter()
        if self._ended and self._profiled <= 0:
            self._left = True
            self._leaves()
            raise Enough
        self._step_s = time.perf_counter()

    def _warm(self) -> bool:
        """Whether the next steps are like all that follow, as far as that can be waited for."""
        self._warm_s = self._warm_s or time.perf_counter()
        return self._settled() or time.perf_counter() - self._warm_s > UNSETTLED_S

    def _end_if_enough(self) -> None:
        long = time.perf_counter() - self._begun_s >= self._least_s
        if self.counted < self._steps or not (long or self.counted >= MOST_STEPS):
            return
        wait_for_gpu()
        self.seconds = time.perf_counter() - self._begun_s
        self._ended = True
        self._ends()

    def end_early(self) -> bool:
        """The function has ended by itself; whether there were steps enough to say something."""
        if self._ended:
            return True
        if self.counted < LEAST:
            return False
        self.seconds = self._step_s - self._begun_s
        self._ends()
        return True


def wait_for_gpu() -> None:
    """All that was given to it is done."""
    if runtime.is_initialized():
        runtime.synchronize()
