"""Counts a function's steps by those of its optimizer, and ends the function when there are enough.

The first steps do not count: allocators and caches fill, workers start, code is compiled.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

LEAST = 3  # counted steps that say something


class Enough(BaseException):
    """The steps that were wanted are done. No `Exception`, which training code may catch."""


class Steps:
    """The steps of the optimizer that steps first: one that steps beside it is part of its steps.

    Args:
        warm_up, steps, profiled: how many are not counted, are counted, and come behind these.
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
        begins: Callable[[], None],
        ends: Callable[[], None],
        leaves: Callable[[], None],
    ) -> None:
        self._first, self._last, self._enough = warm_up, warm_up + steps, warm_up + steps + profiled
        self._begins, self._ends, self._leaves = begins, ends, leaves
        self._owner: Callable[[], Any] = lambda: None
        self._begun_s = self._step_s = 0.0
        self._left = False
        self.done = 0
        """All steps so far."""
        self.seconds = 0.0
        """Of those that were counted."""

    @property
    def counted(self) -> int:
        """Those that are counted, of the steps so far."""
        return max(0, min(self.done, self._last) - self._first)

    @property
    def warming_up(self) -> bool:
        return self.done < self._first

    def step(self, optimizer: Any, *_: Any) -> None:
        """One more, of some optimizer; a hook of torch's."""
        if self._left:
            os._exit(0)
        if self._owner() is None:
            self._owner = weakref.ref(optimizer)
        if self._owner() is not optimizer:
            return
        self.done += 1
        if self.done == self._first:
            wait_for_gpu()
            self._begins()
            self._begun_s = time.perf_counter()
        if self.done == self._last:
            wait_for_gpu()
            self.seconds = time.perf_counter() - self._begun_s
            self._ends()
        if self.done == self._enough:
            self._left = True
            self._leaves()
            raise Enough
        self._step_s = time.perf_counter()

    def end_early(self) -> bool:
        """The function has ended by itself; whether there were steps enough to say something."""
        if self.done >= self._last:
            return True
        if self.counted < LEAST:
            return False
        self.seconds = self._step_s - self._begun_s
        self._ends()
        return True


def wait_for_gpu() -> None:
    """All that was given to it is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
