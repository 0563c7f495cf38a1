"""Emulated link between a device and its host: when copies at a stated rate arrive.

Bytes are copied at once, by the CPU; who uses them waits until the link would have carried them.
Both directions carry at the same time, and copies of a direction one after another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpumix.hardware.emulation.timeline import Timeline
from gpumix.schema.plan.stage import Place


class EmulatedLink:
    """A link of `bytes_per_s` in each direction.

    Args:
        timeline: of the device, whose thread earns no credit while it waits.
        clock: monotonic seconds, the same for all processes of the host.
        sleep: sleeps for some seconds.
    """

    def __init__(
        self,
        bytes_per_s: float,
        timeline: Timeline,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.clock = clock
        self._timeline = timeline
        self._sleep = sleep
        self._thread = threading.get_ident()
        self._directions: dict[Place, LinkDirection] = {
            "device": LinkDirection(self),
            "host": LinkDirection(self),
        }

    def towards(self, place: Place) -> LinkDirection:
        """Return the direction of copies to `place`."""
        return self._directions[place]

    def wait_until(self, at_s: float) -> None:
        """Sleep until the clock reads `at_s`."""
        remaining = at_s - self.clock()
        if remaining <= 0:
            return
        if threading.get_ident() != self._thread:
            self._sleep(remaining)
            return
        with self._timeline.waiting():
            self._sleep(remaining)


@dataclass
class LinkDirection:
    """One direction of a link.

    Attributes:
        last: arrival of the latest copy; None before the first.
    """

    link: EmulatedLink
    last: LinkArrival | None = field(default=None, init=False)

    def carry(self, size_bytes: int) -> LinkArrival:
        """Start to carry `size_bytes`, behind earlier copies."""
        begin = self.link.clock()
        if self.last is not None:
            begin = max(begin, self.last.at_s)
        self.last = LinkArrival(self.link, begin + size_bytes / self.link.bytes_per_s)
        return self.last


@dataclass(frozen=True)
class LinkArrival:
    """End of a copy: the clock reads `at_s`."""

    link: EmulatedLink
    at_s: float

    def wait(self) -> None:
        self.link.wait_until(self.at_s)
