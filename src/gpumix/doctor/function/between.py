"""What passes between an update, or a backward pass, and the next forward pass: in code that makes
batches and that no loader is part of, say."""

from __future__ import annotations

import time
from collections.abc import Callable


class Between:
    """Adds up the host's time there.

    Args:
        elsewhere: seconds so far that are told of by others: those of them that pass meanwhile do
            not count.
    """

    def __init__(self, elsewhere: Callable[[], float]) -> None:
        self._elsewhere = elsewhere
        self._since: tuple[float, float] | None = None
        self.seconds = 0.0

    def forget(self) -> None:
        """All so far; one that has begun begins anew."""
        self.seconds = 0.0
        if self._since is not None:
            self.begin()

    def begin(self) -> None:
        """A pass, or an update, is done; the last one before a forward pass counts."""
        self._since = time.perf_counter(), self._elsewhere()

    def drop(self) -> None:
        """It was none: an update comes before the next forward pass."""
        self._since = None

    def end(self) -> None:
        """A forward pass begins."""
        if self._since is None:
            return
        begun_s, told_s = self._since
        self._since = None
        passed_s = time.perf_counter() - begun_s
        self.seconds += max(0.0, passed_s - (self._elsewhere() - told_s))
