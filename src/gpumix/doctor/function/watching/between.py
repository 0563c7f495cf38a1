"""Host time between an update or a backward pass and the next forward pass, for example in code
creating batches without a loader."""

from __future__ import annotations

import time
from collections.abc import Callable


class HostGapTimer:
    """Accumulated host time between steps.

    Args:
        elsewhere: seconds so far attributed to other causes; seconds passing there meanwhile do not
            count.
    """

    def __init__(self, elsewhere: Callable[[], float]) -> None:
        self._elsewhere = elsewhere
        self._since: tuple[float, float] | None = None
        self.seconds = 0.0

    def get_interval(self) -> object:
        """Return an object identifying the running interval; None between intervals."""
        return self._since

    def forget(self) -> None:
        """Reset the total; a running interval restarts."""
        self.seconds = 0.0
        if self._since is not None:
            self.begin()

    def begin(self) -> None:
        """Start an interval after a backward pass or an update; the latest start counts."""
        self._since = time.perf_counter(), self._elsewhere()

    def drop(self) -> None:
        """Discard the interval: an update comes before the next forward pass."""
        self._since = None

    def end(self) -> None:
        """End the interval at the start of a forward pass."""
        if self._since is None:
            return
        begun_s, told_s = self._since
        self._since = None
        passed_s = time.perf_counter() - begun_s
        self.seconds += max(0.0, passed_s - (self._elsewhere() - told_s))
