"""What each step of a rank spends its time on, told by clocks that run anyway.

The time of a step is cut into two at the moment at which the device begins to compute it. Before
that the device stands idle, for the loader (*input*) or for the host (*other*); after it, it waits
for other ranks (*communication*), for *copies*, or computes. Stamps on CUDA are events on the
stream: one that is recorded before the last step's work is done fires when it is, so what is
measured is the device's own gap. The host's wait would say more than is lost wherever the host runs
ahead. Nothing is synchronised for it; a step is read when the device is done with it, which on CUDA
may be while the next one computes.

What runs once a step finds its code and data gone from the caches, and takes ten times as long as
in a loop of its own: so it does little, and makes no objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from gpumix.cost.input import STARVED_SHARE
from gpumix.hardware.stamps import Stamps
from gpumix.train.account import Account, Shares

WINDOW_STEPS = 20  # of fewer, noise is told as a finding

T = TypeVar("T")


class Clock(Protocol):
    """Adds up what a device waits for."""

    def mark(self) -> Any:
        """This place in the waits; nothing is waited for."""
        ...

    def at_s(self, mark: Any) -> float:
        """Seconds of all waits before it."""
        ...


class Ticks(NamedTuple):
    """A step that was given to the device, by stamps and by marks of the clocks: `begun`, its first
    `work`, `ended`. The host `waited_s` for its batch."""

    begun: Any
    work: Any
    ended: Any
    waited_s: float
    communicated: tuple[Any, Any]
    copied: tuple[Any, Any]


class Watch:
    """Tells a rank's steps apart. Each step is `begin`, `next_of` the loader, which may be asked
    several times, `computes` when its first work is given to the device, and `given` when its last
    is. What it was spent on is known when it is `read`.

    Args:
        stamps: the device's time; see `hardware.stamps`.
        communication, copies: clocks of what the device waits for.
        clock: the host's.
    """

    def __init__(
        self,
        stamps: Stamps[Any],
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
        # Of the last step that was read, as `Account.of` has it.
        self._last = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._steps = 0
        self._gap_s = self._starved_s = self._busy_s = self._waits_s = self._copying_s = 0.0
        self.starvation = Starvation()

    def begin(self) -> None:
        self._communicated, self._copied = self._communication.mark(), self._copies.mark()
        self._waited_s = 0.0
        self._begun = self._now()

    def next_of(self, batches: Iterator[T]) -> T:
        """The next batch; the wait for it is the loader's."""
        asked = self._clock()
        batch = next(batches)
        self._waited_s += self._clock() - asked
        return batch

    def computes(self) -> None:
        self._work = self._now()

    def given(self) -> Ticks:
        """The step, to be read when the device is done with it."""
        return Ticks(
            self._begun,
            self._work,
            self._now(),
            self._waited_s,
            (self._communicated, self._communication.mark()),
            (self._copied, self._copies.mark()),
        )

    def end(self) -> None:
        """The device is done with the step: it is read at once."""
        self.read(self.given())

    def read(self, step: Ticks) -> None:
        """Take in what a step was spent on; waits for the device to be done with it."""
        gap, busy = self._between(step.begun, step.work), self._between(step.work, step.ended)
        starved = step.waited_s if step.waited_s < gap else gap
        waits, copying = self._of_clocks(step)
        if waits + copying > busy:  # a copy that a collective waits for is in both clocks
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

    def _of_clocks(self, step: Ticks) -> tuple[float, float]:
        """Seconds for which the device waited for communication and for copies."""
        begun, ended = map(self._communication.at_s, step.communicated)
        copies_begun, copies_ended = map(self._copies.at_s, step.copied)
        return ended - begun, copies_ended - copies_begun

    @property
    def step_s(self) -> float:
        """How long the device took for the last step, its gap included."""
        return self._last[0] + self._last[2]

    @property
    def computed_s(self) -> float:
        """How long the device computed in the last step."""
        return Account.of(1, *self._last).compute

    def last(self) -> Shares:
        """What the last step was spent on."""
        return Account.of(1, *self._last).shares()

    def take(self) -> Account:
        """Of the steps since this was asked last."""
        taken = Account.of(
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


class Starvation:
    """Whether a rank's device stands idle for its data: `share` is the idle part of the window in
    which that was found, None until it is. Two windows in a row must show it."""

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
        found = share > STARVED_SHARE
        if found and self._before and self.share is None:
            self.share = share
        self._before = found
        self._steps = 0
        self._seconds = self._starved = 0.0
