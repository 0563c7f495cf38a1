"""Time spent in each step of a rank, by clocks that run anyway.

A step is cut in two when the device begins to compute. Before, the device is idle, for the loader
(*input*) or for the host (*other*); after, it waits for other ranks (*communication*), for
*copies*, or computes. Stamps on CUDA are events on the stream: an event recorded before the last
step's work is done fires when it is, so the gap measured is the device's own. The host's wait would
overstate the loss wherever the host runs ahead. Nothing is synchronized; a step is read when the
device is done with it, on CUDA maybe while the next step computes.

Code that runs once a step finds its code and data gone from the caches, and takes ten times as long
as in a loop of its own: so it does little, and creates no objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.hardware.timestamps import DeviceClock
from gpumix.train.run_log.time_breakdown import TimeBreakdown, TimeShares

WINDOW_STEPS = 20  # fewer report noise as a finding

T = TypeVar("T")


class Clock(Protocol):
    """Sum of a device's waits."""

    def mark(self) -> Any:
        """Mark the present place in the waits, without waiting."""
        ...

    def at_s(self, mark: Any) -> float:
        """Return the seconds of all waits before a mark."""
        ...


class StepStamps(NamedTuple):
    """Stamps and clock marks of a step issued to the device: `begun`, first `work`, `ended`. The
    host `waited_s` for the batch."""

    begun: Any
    work: Any
    ended: Any
    waited_s: float
    communicated: tuple[Any, Any]
    copied: tuple[Any, Any]


class StepTimer:
    """Account of a rank's steps. Each step calls `begin`, `next_of` the loader, maybe several
    times, `computes` when its first work is issued, and `given` after its last. The account is
    known after `read`.

    Args:
        stamps: the device's time; see `hardware.timestamps`.
        communication, copies: clocks of the device's waits.
        clock: the host's.
    """

    def __init__(
        self,
        stamps: DeviceClock[Any],
        communication: Clock,
        copies: Clock,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now, self._between, self._clock = stamps.now, stamps.between, clock
        self._communication, self._copies = communication, copies
        self._communicated, self._copied = communication.mark(), copies.mark()
        self._begun = self._work = stamps.now()
        self._waited_s = 0.0
        # Of the last step read, in the order of `Account.of`.
        self._last = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._steps = 0
        self._gap_s = self._starved_s = self._busy_s = self._waits_s = self._copying_s = 0.0
        self.starvation = StarvationDetector()

    def begin(self) -> None:
        self._communicated, self._copied = self._communication.mark(), self._copies.mark()
        self._waited_s = 0.0
        self._begun = self._now()

    def next_of(self, batches: Iterator[T]) -> T:
        """Return the next batch; the wait counts as the loader's."""
        asked = self._clock()
        batch = next(batches)
        self._waited_s += self._clock() - asked
        return batch

    def computes(self) -> None:
        self._work = self._now()

    def given(self) -> StepStamps:
        """Return the step, to be read when the device is done with it."""
        return StepStamps(
            self._begun,
            self._work,
            self._now(),
            self._waited_s,
            (self._communicated, self._communication.mark()),
            (self._copied, self._copies.mark()),
        )

    def end(self) -> None:
        """Read the step at once: the device is done with it."""
        self.read(self.given())

    def read(self, step: StepStamps) -> None:
        """Account for a step; wait until the device is done with it."""
        gap, busy = self._between(step.begun, step.work), self._between(step.work, step.ended)
        starved = step.waited_s if step.waited_s < gap else gap
        waits, copying = self._of_clocks(step)
        if waits + copying > busy:  # a copy awaited by a collective is in both clocks
            waits = waits if waits < busy else busy
            copying = busy - waits
        self._last = (gap, starved, busy, waits, copying)
        self._steps += 1
        self._gap_s += gap
        self._starved_s += starved
        self._busy_s += busy
        self._waits_s += waits
        self._copying_s += copying
        self.starvation.add(gap + busy, starved)

    def _of_clocks(self, step: StepStamps) -> tuple[float, float]:
        """Return the seconds of waits for communication and for copies."""
        begun, ended = map(self._communication.at_s, step.communicated)
        copies_begun, copies_ended = map(self._copies.at_s, step.copied)
        return ended - begun, copies_ended - copies_begun

    @property
    def step_s(self) -> float:
        """Device time of the last step, including the gap."""
        return self._last[0] + self._last[2]

    @property
    def computed_s(self) -> float:
        """Compute time of the last step."""
        return TimeBreakdown.of(1, *self._last).compute

    def last(self) -> TimeShares:
        """Return the shares of the last step."""
        return TimeBreakdown.of(1, *self._last).shares()

    def take(self) -> TimeBreakdown:
        """Return the account of the steps since the last call."""
        taken = TimeBreakdown.of(
            self._steps,
            self._gap_s,
            self._starved_s,
            self._busy_s,
            self._waits_s,
            self._copying_s,
        )
        self._steps = 0
        self._gap_s = self._starved_s = self._busy_s = self._waits_s = self._copying_s = 0.0
        return taken


class StarvationDetector:
    """Detection of a device idle for lack of data. `share` is the idle part of the window with the
    finding, None before; two windows in a row must show it."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._steps = 0
        self._seconds = self._starved = 0.0
        self._before = False

    def add(self, seconds: float, starved: float) -> None:
        self._steps += 1
        self._seconds += seconds
        self._starved += starved
        if self._steps == WINDOW_STEPS:
            self._close_window()

    def _close_window(self) -> None:
        share = self._starved / self._seconds if self._seconds > 0 else 0.0
        found = share > MIN_STARVED_SHARE
        if found and self._before and self.share is None:
            self.share = share
        self._before = found
        self._steps = 0
        self._seconds = self._starved = 0.0
