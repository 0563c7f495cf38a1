"""Work that a rank does beside training, in a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gpumix.engine.held_up import Wait
from gpumix.engine.stands import wait_of

T = TypeVar("T")


class Overdue(Exception):
    """Work did not end in its time, because of a disk say.

    Args:
        wait: for other ranks, if it waits for them.
    """

    def __init__(self, patience_s: float, wait: Wait | None) -> None:
        super().__init__(f"after {patience_s:.0f} s")
        self.patience_s = patience_s
        self.wait = wait


class Background(Generic[T]):
    """`work`, which runs until it returns or raises.

    Whoever leaves by an error does not wait for it: it may never end. So it ends with the process.

    Args:
        patience_s: how long it may take; waits end then.
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
        """Whether `result` will raise, as far as it is known."""
        return self._error is not None or (not self.ended and time.monotonic() > self._deadline)

    def wait(self, event: threading.Event) -> None:
        """Wait for something that the work does on its way.

        Raises:
            Overdue: it has not done it in its time.
        """
        if not event.wait(self._left_s()):
            raise self._overdue()

    def join(self, seconds: float) -> None:
        """Until it has ended, but not longer."""
        self._thread.join(seconds)

    def result(self) -> T:
        """What the work returned, once it has; raises what it raised.

        Raises:
            Overdue: it has not ended in its time.
        """
        self._thread.join(self._left_s())
        if self._thread.is_alive():
            raise self._overdue()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _left_s(self) -> float:
        return min(max(0.0, self._deadline - time.monotonic()), threading.TIMEOUT_MAX)

    def _overdue(self) -> Overdue:
        return Overdue(self._patience_s, wait_of(self._thread.ident))
