"""Shutdown of a rank's background threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

JOIN_TIMEOUT_S = 5.0


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that are about to end, with a time limit. A thread in C++ code of torch when
    the interpreter ends takes the process with it: `terminate called without an active
    exception`."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
