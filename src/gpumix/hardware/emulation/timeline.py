"""Clock of an emulated device: the completion time of submitted work.

The process runs an operation on the CPU, then sleeps until the device would have finished. Pure
bookkeeping with an injected clock, so tests use virtual time; `Pacer` drives the timeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Largest lead of the device before the process sleeps: many short sleeps cost more than they pace,
# and overshoot (about 0.1 ms each) is deducted from the next sleep anyway.
LEAD_S = 0.002
# Largest lag of the device behind the process: CPU time of Python and of operations without FLOPs,
# which the device hides behind matrix multiplications, and short losses of the core.
CREDIT_S = 0.050
_ROUNDING_S = 1e-6


class Timeline:
    """A device computing operations in sequence at `flops_per_s`.

    An operation of F FLOPs starts at `busy_until`, or at its submission time minus the credit,
    whichever is later, and takes F / rate. The lag is how far `busy_until` is behind the clock; a
    lag beyond the credit is an overrun: the CPU was slower than the device, which invalidates a
    measurement.

    Attributes:
        busy_until: clock reading, s, when the device completes all submitted work.
        flops: FLOPs of all operations so far.
        overruns: number of times the lag exceeded the credit.
        overrun_s: total excess, s.
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
        """Record the start of an operation on the CPU."""
        self._settle(self._clock())

    def end(self, flops: int) -> None:
        """Record the end of an operation; sleep if the device would not be finished yet."""
        self.flops += flops
        self.busy_until += flops / self.flops_per_s
        now = self._clock()
        self._settle(now)
        if self.busy_until - now > LEAD_S:
            self._sleep(self.busy_until - now)

    def drain(self) -> None:
        """Sleep until the device has completed all its work; keep the lag."""
        remaining = self.busy_until - self._clock()
        if remaining > 0:
            self._sleep(remaining)

    def idle(self) -> None:
        """Forget the lag: the device had no work until now."""
        self.busy_until = max(self.busy_until, self._clock())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep the lag constant while the process waits for other processes."""
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
