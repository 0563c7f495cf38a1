"""Background work of a rank during training, in a separate thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gpumix.engine.comm.collective_progress import get_awaited_collective
from gpumix.engine.comm.hang_attribution import AwaitedCollective

T = TypeVar("T")


class BackgroundTimeout(Exception):
    """Work exceeded the time limit, for example because of a disk.

    Args:
        wait: the wait for other ranks, if the work waits for some.
    """

    def __init__(self, patience_s: float, wait: AwaitedCollective | None) -> None:
        super().__init__(f"after {patience_s:.0f} s")
        self.patience_s = patience_s
        self.wait = wait


class BackgroundTask(Generic[T]):
    """`work` in a daemon thread, running until it returns or raises.

    A caller leaving by an error does not join the thread, which may never end: it ends with the
    process.

    Args:
        patience_s: time limit of the work; waits end at the limit.
    """

    def __init__(self, work: Callable[[], T], *, name: str, patience_s: float = math.inf) -> None:
        self._work = work
        self._patience_s = patience_s
        self.begun_at = time.monotonic()
        self._deadline = self.begun_at + patience_s
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True if `result` will raise, as far as is known."""
        return self._error is not None or (not self.ended and time.monotonic() > self._deadline)

    def wait(self, event: threading.Event) -> None:
        """Wait for an event set by the work.

        Raises:
            Overdue: the event is not set within the time limit.
        """
        if not event.wait(self._left_s()):
            raise self._make_timeout()

    def join(self, seconds: float) -> None:
        """Wait until the work has ended, at most for `seconds`."""
        self._thread.join(seconds)

    def result(self) -> T:
        """Return the result of the work once it has ended, or raise the work's error.

        Raises:
            Overdue: the work has not ended within the time limit.
        """
        self._thread.join(self._left_s())
        if self._thread.is_alive():
            raise self._make_timeout()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _left_s(self) -> float:
        return min(max(0.0, self._deadline - time.monotonic()), threading.TIMEOUT_MAX)

    def _make_timeout(self) -> BackgroundTimeout:
        return BackgroundTimeout(self._patience_s, get_awaited_collective(self._thread.ident))
