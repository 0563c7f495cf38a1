"""The clock of an emulated device: when the work that it was given is done.

The process runs an operation on the CPU, then sleeps until the device would have finished it. Pure
bookkeeping over an injected clock, so that its rules are tested in virtual time; `Pacer` feeds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The device may be ahead of the process by this much before the process sleeps: many short sleeps
# cost more than they pace, and an overshoot (about 0.1 ms each) is taken off the next sleep anyway.
LEAD_S = 0.002
# How far the device may lag behind the process: the CPU time of Python and of operations without
# FLOPs, which the device hides behind its matrix multiplications, and short losses of the core.
CREDIT_S = 0.050
_ROUNDING_S = 1e-6


class Timeline:
    """A device that computes `flops_per_s`, one operation after the other.

    An operation of F FLOPs starts at `busy_until`, or when the process gave it to the device less
    the credit, whichever is later, and takes F / rate. The lag is how far `busy_until` lies behind
    the clock; a lag beyond the credit means that the CPU was slower than the device it stands for:
    an overrun, which spoils a measurement.

    Attributes:
        busy_until: clock reading, s, at which the device is done with all that it was given.
        flops: FLOPs of all operations so far.
        overruns: how many times the lag went beyond the credit.
        overrun_s: by how much, s, summed over all times.
    """

    def __init__(
        self,
        flops_per_s: float,
        *,
        credit_s: float = CREDIT_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.flops_per_s = flops_per_s
        self.credit_s = credit_s
        self._clock = clock
        self._sleep = sleep
        self.busy_until = clock()
        self.reset()

    def begin(self) -> None:
        """An operation is about to run on the CPU."""
        self._settle(self._clock())

    def end(self, flops: int) -> None:
        """The operation ran; sleep if the device would not be done with it yet."""
        self.flops += flops
        self.busy_until += flops / self.flops_per_s
        now = self._clock()
        self._settle(now)
        if self.busy_until - now > LEAD_S:
            self._sleep(self.busy_until - now)

    def drain(self) -> None:
        """Sleep until the device is done with all that it was given; keeps the lag."""
        remaining = self.busy_until - self._clock()
        if remaining > 0:
            self._sleep(remaining)

    def idle(self) -> None:
        """The device had nothing to do until now: forget the lag."""
        self.busy_until = max(self.busy_until, self._clock())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The process waits for others meanwhile: the lag stays what it was, it does not grow."""
        lag = max(0.0, self._clock() - self.busy_until)
        try:
            yield
        finally:
            self.busy_until = max(self.busy_until, self._clock() - lag)

    def reset(self) -> None:
        """Forget the lag and set all counters to zero."""
        self.idle()
        self.flops = 0
        self.overruns = 0
        self.overrun_s = 0.0

    def _settle(self, now: float) -> None:
        excess = now - self.busy_until - self.credit_s
        if excess > _ROUNDING_S:
            self.overruns += 1
            self.overrun_s += excess
            self.busy_until += excess
