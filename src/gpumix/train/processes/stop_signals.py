"""Stop requests by Ctrl-C, SIGTERM or a closing terminal (SIGHUP): finish the step, then save."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from gpumix.schema.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def asks_immediate_end(number: int) -> bool:
    """Return True if a repeated signal asks for an immediate end, as Ctrl-C does. SIGTERM may come
    twice, or to a process and its group, and grants no less time."""
    return number == signal.SIGINT


def get_handled_signals() -> list[signal.Signals]:
    """Return the signals to handle; under nohup a closing terminal ends nothing."""
    kept = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
    return [one for one in SIGNALS if one not in kept]


@contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], Any] | int
) -> Iterator[None]:
    """Handle signals by `handler` inside the block. Only the main thread can; others change
    nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


class StopRequest:
    """Stop request by a signal during a `with` block. After an error SIGTERM stays handled until
    the process ends: torchrun's agent sends it as soon as one rank has ended, and the others have
    yet to report which."""

    pending_since: float | None = None
    """Time of an unanswered request to stop, by `time.monotonic()`: ranks were lost, or failed, and
    restart to answer it."""

    def __init__(self) -> None:
        self.asked_at = StopRequest.pending_since
        """Time of the request, by `time.monotonic()`."""
        self._before: dict[signal.Signals, Any] = {}
        self._error: BaseException | None = None
        self._open = False

    def __enter__(self) -> StopRequest:
        self._read, self._written = socket.socketpair()
        for end in (self._read, self._written):
            end.setblocking(False)
        self._open = True
        self._before = {s: signal.signal(s, self._take) for s in get_handled_signals()}
        self._fd_before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        signal.set_wakeup_fd(self._fd_before)
        failed = isinstance(error, Exception) and not isinstance(error, Interrupted)
        if failed:
            StopRequest.pending_since = self.asked_at
        for number, handler in self._before.items():
            if not (failed and number == signal.SIGTERM):
                signal.signal(number, handler)
        self._written.close()  # wakes a thread in `wait`

    @property
    def requested(self) -> bool:
        return self.asked_at is not None

    def wait(self, seconds: float) -> None:
        """Wait for a signal, at most `seconds`; for one other thread. Signals are noticed even
        while the main thread, where Python handles signals, is in a long library call."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        if ready and set(self._read.recv(64)) & set(SIGNALS):
            self._note()

    def wake(self) -> None:
        """End the other thread's `wait`."""
        with suppress(BlockingIOError):
            self._written.send(b"\0")

    def leave(self, error: BaseException) -> None:
        """Raise an error in the main thread, anywhere in the `with` block; called from another
        thread."""
        if not self._open:
            return
        self._error = error
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._note()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _note(self) -> None:
        self.asked_at = self.asked_at or time.monotonic()
        if not self._open:
            StopRequest.pending_since = self.asked_at
