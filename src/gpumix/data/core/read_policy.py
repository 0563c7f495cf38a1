"""Reading of samples: handling of samples that cannot be read, or never arrive.

Readers note the sample they are at, so that a waiting thread can name it: threads for the other
threads of the process, processes for their parent, in shared memory.
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

from gpumix.schema.errors import TrainingError

BadSamples = Literal["stop", "skip"]
"""Handling of an unreadable sample: stop the run, or replace the sample by another."""

NO_SAMPLE = -1
SEVERAL = -2  # requested at once
NOTE_BYTES = 256  # a sample's number, and the name of its dataset
_NOTE = struct.Struct(f"q{NOTE_BYTES - 8}s")
NOTHING_READ = _NOTE.pack(NO_SAMPLE, b"")
_LOOK_S = 0.1
IF_SLOW = (
    "look at that sample; if it takes that long, wait longer: --set advanced.timeout=..., in a "
    "loop of one's own Loader(timeout_s=...)"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """Settings for the reading of samples.

    Attributes:
        timeout_s: seconds after which a sample counts as never arriving.
    """

    bad_samples: BadSamples = "stop"
    timeout_s: float = 300.0


DEFAULT_READING = Reading()


class StuckError(TrainingError):
    """A sample that never arrived. The reader cannot be ended, so a replacement cannot be read."""


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be read.

    Attributes:
        index: number of the sample in the original data; for a document in a pack, its own.
        instead: number of the replacement; None: the pack does without it.
        of: requested index: of the sample, or of the pack.
    """

    index: int
    instead: int | None
    why: str
    of: int = NO_SAMPLE


class ThreadNotes(threading.local):
    """Notes of one thread.

    Attributes:
        at: the sample being read, and since when by `time.monotonic`: a live list for others.
        failed: the last sample that could not be read, `SEVERAL`, or `NO_SAMPLE`.
        skips: whether a row may lack parts that cannot be read.
        skipped: parts missing from rows, by place among the rows being read; None: not recorded.
    """

    def __init__(self) -> None:
        self.at: list[float] = [NO_SAMPLE, 0.0]
        self.failed = NO_SAMPLE
        self.skips = False
        self.skipped: list[tuple[int, Skipped]] | None = None


notes = ThreadNotes()
_shared_note: tuple[mmap.mmap, int] | None = None  # where this process notes the sample it reads


def note_sample_begin(index: int, name: str) -> None:
    """Note a sample of the dataset `name` as being read by this thread."""
    notes.at[:] = index, time.monotonic()
    if _shared_note is not None:
        _NOTE.pack_into(*_shared_note, index, name.encode())


def note_sample_end() -> None:
    """Note the end of reading in this thread."""
    note_sample_begin(NO_SAMPLE, "")


@contextmanager
def collect_skipped(bad_samples: BadSamples) -> Iterator[list[tuple[int, Skipped]]]:
    """Collect the parts missing from rows read in the block, with the places of the rows.
    Unreadable parts are left out if bad samples are skipped."""
    before = notes.skips, notes.skipped
    found: list[tuple[int, Skipped]] = []
    notes.skips, notes.skipped = bad_samples == "skip", found
    try:
        yield found
    finally:
        notes.skips, notes.skipped = before


def record_skipped_part(row: int, what: Skipped) -> None:
    """Record a row's missing part, which could not be read."""
    if notes.skipped is not None:
        notes.skipped.append((row, what))


def share_note_in(memory: mmap.mmap, offset: int = 0) -> None:
    """Make this process note in `memory` the sample it reads; among threads, the last to begin or
    end a sample counts."""
    global _shared_note
    _shared_note = memory, offset


def read_shared_note(memory: mmap.mmap, offset: int = 0) -> tuple[int, str]:
    """Return the note of a process: the number of a sample, or `NO_SAMPLE`, and its dataset."""
    index, name = _NOTE.unpack_from(memory, offset)
    return index, name.rstrip(b"\0").decode(errors="replace")


def run_with_timeout(read: Callable[[], T], name: str, timeout_s: float) -> T:
    """Return or raise the result of `read`. It runs in a thread, which is left behind if a sample
    takes too long; work other than reading samples may take any time.

    Raises:
        StuckError: a sample of the dataset `name` did not arrive.
    """
    found: list[Any] = []
    at: list[list[float]] = []

    def run() -> None:
        at.append(notes.at)
        try:
            found.append((read(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, name="gpumix-read", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        index, since_s = at[0] if at else (NO_SAMPLE, 0.0)
        if not found and index != NO_SAMPLE and time.monotonic() - since_s > timeout_s:
            raise StuckError(
                f"sample {index:.0f} of {name} does not come: it was waited for more than "
                f"{timeout_s:g} s",
                code="sample-timeout",
                where=f"process {os.getpid()}",
                fix=IF_SLOW,
            )
    value, error = found[0]
    if error is not None:
        raise error
    result: T = value
    return result
