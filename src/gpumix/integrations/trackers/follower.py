"""Follower of a run's `metrics.jsonl` with a saved position: no line is sent twice.

A resumed run drops unsaved steps and repeats them: a shorter file replaces the file. A tracker
keeps its values; repeated steps are not sent.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from gpumix.integrations.trackers.metric_names import NUMERIC_KINDS
from gpumix.schema.files import (
    LINE_BYTES,
    MARK_BYTES,
    make_library_folder,
    open_for_reading,
    open_lock_file,
    read_text,
    write_text_atomically,
)
from gpumix.train.run_log import run_files

REQUIRED_KEYS = {"event", "step", "time"}


@dataclass
class TrackerPosition:
    """Position of a tracker in a run.

    Attributes:
        run: the tracker's own id of the run; None before the run began there.
        since: when the run began (`time.time()`): older lines are of an earlier run in the folder.
        steps: the last step sent, by kind of line.
        time_s: of the last event.
    """

    run: str | None = None
    since: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    time_s: float = 0.0

    @property
    def done(self) -> int:
        return max(self.steps.values(), default=0)

    def passes(self, line: dict[str, Any]) -> bool:
        """Return True if a line is new, and mark it as sent. Events go by time: repeated steps do
        not repeat events."""
        kind, step, time_s = line["event"], line["step"], line["time"]
        if time_s < self.since:
            return False
        if kind in NUMERIC_KINDS:
            new: bool = step > self.steps.get(kind, 0)
            self.steps[kind] = max(step, self.steps.get(kind, 0))
            return new
        new = time_s > self.time_s
        self.time_s = max(time_s, self.time_s)
        return new

    def save(self, path: Path) -> None:
        write_text_atomically(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> TrackerPosition | None:
        """Return the saved marks, or None if missing or unreadable."""
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            found = cls(**json.loads(read_text(path, MARK_BYTES)))
            numbers = [found.since, found.time_s, *found.steps.values()]
            if isinstance(found.run, str | None) and all(
                isinstance(n, int | float) for n in numbers
            ):
                return found
        return None


@contextmanager
def lock_position(
    output: Path, tracker: str, since: float
) -> Iterator[tuple[TrackerPosition, Path]]:
    """Yield the marks of a tracker and the marks' file, locked for this process.

    Args:
        since: when the run began; 0 if it resumes.
    """
    folder = make_library_folder(output / run_files.TRACKERS)
    path = folder / f"{tracker}.json"
    with os.fdopen(open_lock_file(folder / f"{tracker}.lock"), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process about to end
        found = None if since else TrackerPosition.load(path)
        yield found or TrackerPosition(since=since), path


class Follower:
    """Reader of a file that grows, and may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = ExitStack()
        self._file: IO[bytes] | None = None

    def close(self) -> None:
        self._open.close()
        self._file = None

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield complete lines written since the last call; of a new file all lines."""
        if self._file is None or self._is_replaced():
            self.close()
            with suppress(FileNotFoundError):
                self._file = self._open.enter_context(open_for_reading(self._path))
        while self._file is not None:
            begin, line = self._file.tell(), self._file.readline(LINE_BYTES)
            if len(line) == LINE_BYTES:
                raise ValueError(f"{self._path} has a line of more than {LINE_BYTES:,} bytes")
            if not line.endswith(b"\n"):  # the rest of the line will follow
                self._file.seek(begin)
                return
            with suppress(ValueError):
                told = json.loads(line)
                if told.keys() >= REQUIRED_KEYS:
                    yield told

    def _is_replaced(self) -> bool:
        assert self._file is not None
        with suppress(FileNotFoundError):
            # The old file is still open, so its inode number is not reused.
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        return False
