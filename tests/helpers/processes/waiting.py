"""How tests wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    done: Callable[[], T],
    limit_s: float = 60.0,
    *,
    told: Callable[[], str] = lambda: "it did not come to that",
) -> T:
    """Wait until `done` returns something true, and return that; `told` explains a failure."""
    deadline = time.monotonic() + limit_s
    while not (found := done()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)
    return found
