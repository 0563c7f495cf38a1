"""How samples are read: what happens to one that cannot be, and to one that never comes.

Whoever reads samples notes at which one it is, so that whoever waits can name it: each thread for
the others of its process, each process for the one that started it, in memory that they share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gpumix.spec.errors import TrainingError

BadSamples = Literal["stop", "skip"]
"""Whether a sample that cannot be read stops the run, or another one takes its place."""

NO_SAMPLE = -1
SEVERAL = -2  # that are asked for at once
NOTE_BYTES = 256  # a sample's number, and its dataset's name
_NOTE = struct.Struct(f"q{NOTE_BYTES - 8}s")
NOTHING_READ = _NOTE.pack(NO_SAMPLE, b"")
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


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be read.

    Attributes:
        index: its number, as whoever made the data counts; of a document that would be packed, its
            own.
        instead: the number of the one in its place; None: its pack does without it.
        of: the index that was asked for: of the sample, or of the pack.
    """

    index: int
    instead: int | None
    why: str
    of: int = NO_SAMPLE


class _Notes(threading.local):
    """Of one thread.

    Attributes:
        at: the sample that it reads, and since when.
        failed: the last one that it could not read.
        skips: whether a row may lack what cannot be read of it.
        skipped: what rows lack, by their places among those that are read; None: nobody asks.
    """

    def __init__(self) -> None:
        self.at: list[float] = [NO_SAMPLE, 0.0]
        self.failed = NO_SAMPLE
        self.skips = False
        self.skipped: list[tuple[int, Skipped]] | None = None


_notes = _Notes()
_told: tuple[mmap.mmap, int] | None = None  # where this process tells what it reads


def begins(index: int, name: str) -> None:
    """This thread begins to read a sample of the dataset `name`."""
    _notes.at[:] = index, time.monotonic()
    if _told is not None:
        _NOTE.pack_into(*_told, index, name.encode())


def ends() -> None:
    """This thread has read its samples."""
    begins(NO_SAMPLE, "")


def fails(index: int) -> None:
    """This thread could not read a sample, or `SEVERAL`."""
    _notes.failed = index


def none_failed() -> None:
    """From now on."""
    _notes.failed = NO_SAMPLE


def failed_at() -> int:
    """The sample that this thread could not read last, `SEVERAL`, or `NO_SAMPLE`."""
    return _notes.failed


@contextmanager
def skipping(bad_samples: BadSamples) -> Iterator[list[tuple[int, Skipped]]]:
    """This thread reads rows, and what cannot be read of one is left out, if bad samples are
    skipped: the row's place, and what it lacks."""
    before = _notes.skips, _notes.skipped
    found: list[tuple[int, Skipped]] = []
    _notes.skips, _notes.skipped = bad_samples == "skip", found
    try:
        yield found
    finally:
        _notes.skips, _notes.skipped = before


def skips() -> bool:
    """Whether what cannot be read of a row is to be left out."""
    return _notes.skips


def lacks(row: int, what: Skipped) -> None:
    """A row that this thread reads lacks a part that cannot be read."""
    if _notes.skipped is not None:
        _notes.skipped.append((row, what))


def own_notes() -> list[float]:
    """The sample that this thread reads, and since when by `time.monotonic`, for other threads: it
    changes as they go on."""
    return _notes.at


def tell_into(memory: mmap.mmap, offset: int = 0) -> None:
    """From now on this process notes there what it reads; of several threads the one that began or
    ended last."""
    global _told
    _told = memory, offset


def told_in(memory: mmap.mmap, offset: int = 0) -> tuple[int, str]:
    """What a process noted there: the number of a sample, or `NO_SAMPLE`, and its dataset."""
    index, name = _NOTE.unpack_from(memory, offset)
    return index, name.rstrip(b"\0").decode(errors="replace")


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
        index, since_s = notes[0] if notes else (NO_SAMPLE, 0.0)
        if not found and index != NO_SAMPLE and time.monotonic() - since_s > timeout_s:
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
