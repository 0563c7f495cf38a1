"""How samples are read: what happens to one that cannot be, and to one that never comes.

Whoever reads samples notes at which one it is, so that whoever waits can name it: of a thread here,
of a worker process in memory that it shares.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from gpumix.spec.errors import TrainingError

BadSamples = Literal["stop", "skip"]
"""Whether a sample that cannot be read stops the run, or another one takes its place."""

NOBODY = -1  # where the number of a sample stands
_LOOK_S = 0.1
IF_SLOW = (
    "look at that sample; if it takes that long, wait longer: --set timeout=..., in a loop of "
    "one's own Loader(timeout_s=...)"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """
    Attributes:
        timeout_s: after so long a sample counts as one that never comes.
    """

    bad_samples: BadSamples = "stop"
    timeout_s: float = 300.0


AS_USUAL = Reading()


class StuckError(TrainingError):
    """A sample never came. Whoever reads it cannot be ended, so no other can take its place."""


class _Notes(threading.local):
    """Of one thread: `at` is the sample that it reads, and since when; `told` is where else that is
    to stand."""

    def __init__(self) -> None:
        self.at: list[float] = [NOBODY, 0.0]
        self.told: np.ndarray | None = None


_notes = _Notes()


def begins(index: int) -> None:
    """This thread begins to read a sample."""
    _notes.at[:] = index, time.monotonic()
    if _notes.told is not None:
        _notes.told[0] = index


def ends() -> None:
    """This thread has read its samples."""
    begins(NOBODY)


def tell_into(place: np.ndarray) -> None:
    """From now on this thread notes the number of its sample there, too."""
    _notes.told = place


def own_notes() -> list[float]:
    """The sample that this thread reads, and since when by `time.monotonic`, for other threads: it
    changes as they go on."""
    return _notes.at


def in_time(read: Callable[[], T], name: str, timeout_s: float) -> T:
    """What `read` returns or raises. It runs in a thread, which is left behind if a sample takes
    too long; what is not the reading of one may take any time.

    Raises:
        StuckError: a sample of the dataset `name` did not come.
    """
    found: list[Any] = []
    notes: list[list[float]] = []

    def run() -> None:
        notes.append(own_notes())
        try:
            found.append((read(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, name="gpumix-read", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        index, since_s = notes[0] if notes else (NOBODY, 0.0)
        if not found and index != NOBODY and time.monotonic() - since_s > timeout_s:
            raise StuckError(
                f"sample {index:.0f} of {name} does not come: it was waited for more than "
                f"{timeout_s:g} s",
                where=f"process {os.getpid()}",
                fix=IF_SLOW,
            )
    value, error = found[0]
    if error is not None:
        raise error
    result: T = value
    return result
