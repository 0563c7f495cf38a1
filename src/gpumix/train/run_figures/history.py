"""Contents of `metrics.jsonl`: steps, evaluations, device records and events.

The run may be active, or may have died in the middle of a line, and older runs wrote fewer fields.
Unreadable lines are counted and skipped, missing fields count as unknown.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from gpumix.schema.errors import InputError
from gpumix.schema.files import iterate_lines, iterate_lines_from_end, open_for_reading
from gpumix.schema.units import format_count
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import (
    SHARE_NAMES,
    ClassRecord,
    RankRecord,
    StepRecord,
    average_windows,
)
from gpumix.train.run_log.time_breakdown import TimeShares

# Limits for long runs; twice as many entries may be kept.
MOST_STEPS, MOST_WINDOWS, MOST_EVENTS, NEWEST = 10_000, 2_000, 10_000, 100
TOGETHER = 8
FIGURE_STEPS = 200  # newest steps, which figures are computed of; none of them is left out
# Starts of step and rank lines, as written by `RunLog`.
_BEGIN = len('{"event": "step"')
_STEP = ('{"event": "step"', b'{"event": "step"')
_RANKS = ('{"event": "ranks', b'{"event": "ranks')
LARGEST_NUMBER = 1e75
RUN_FIGURES = "run"  # event with the figures so far, for trackers
UNREADABLE_FIX = "give the folder of another run, or remove this file: the rest is shown without it"

FIELDS: Mapping[type[Any], Mapping[str, Any]] = {
    kind: get_type_hints(kind) for kind in (StepRecord, ClassRecord, RankRecord)
}

T = TypeVar("T")


@dataclass(frozen=True)
class HistoryEvent:
    """An event: name, last step before it, time (`time.time()`) and content."""

    event: str
    step: int
    time: float | None
    told: Mapping[str, Any]

    def number(self, key: str) -> float | None:
        return parse_number(self.told.get(key))

    def text(self, key: str) -> str:
        value = self.told.get(key)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Evaluation:
    step: int
    loss: float


@dataclass(frozen=True)
class HistoryWindow:
    """Records of the classes from the previous window up to a step."""

    step: int
    classes: tuple[ClassRecord, ...]


@dataclass(frozen=True)
class History:
    """The complete history. `ranks` are the newest records; `unread` lines were not readable.
    `steps` contains one of `every` steps, and each of the newest `FIGURE_STEPS`: `every` is 1
    except in runs of tens of thousands of steps."""

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    windows: tuple[HistoryWindow, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    events: tuple[HistoryEvent, ...] = ()
    unread: int = 0
    every: int = 1

    @property
    def unread_note(self) -> str:
        """A message about unreadable lines, empty if none."""
        lines = format_count(self.unread, "line")
        return f"{lines} of {run_files.METRICS} could not be read" if self.unread else ""

    @property
    def thinning_note(self) -> str:
        """A message about skipped steps, empty if none."""
        return f"One in {self.every} steps is shown" if self.every > 1 else ""

    @property
    def classes(self) -> tuple[ClassRecord, ...]:
        """Records of the last window."""
        return self.windows[-1].classes if self.windows else ()

    @property
    def last_window_steps(self) -> int:
        """Number of steps in the last window, the one that `ranks` are of; 0 without windows."""
        ends = [0, *(one.step for one in self.windows[-2:])]
        return ends[-1] - ends[-2] if self.windows else 0


def load_history(folder: Path, *, newest_bytes: int | None = None) -> History:
    """Read the history of the run in `folder`; empty without metrics.

    Args:
        newest_bytes: read only so many trailing bytes, and at least the lines that figures are
            computed of, for repeated reading.

    Raises:
        InputError: the file is unreadable.
    """
    path = folder / run_files.METRICS
    if not path.exists():
        return History()
    try:
        with open_for_reading(path) as file:
            if newest_bytes is not None:
                file.seek(_find_newest(file, newest_bytes))
            return read_history(iterate_lines(file))
    except OSError as error:
        raise make_unreadable_error(path, error.strerror or str(error)) from error


def make_unreadable_error(path: Path, why: str) -> InputError:
    what = "cannot read this file of the run"
    return InputError(
        what, code="run-file-unreadable", where=str(path), why=why, fix=UNREADABLE_FIX
    )


def _find_newest(file: BufferedReader, newest_bytes: int) -> int:
    """Return where the newest lines begin."""
    size, steps = file.seek(0, os.SEEK_END), 0
    for begin, line in iterate_lines_from_end(file):
        steps += line[:_BEGIN] in _STEP
        if steps > FIGURE_STEPS and size - begin >= newest_bytes:
            return begin
    return 0


def read_history(lines: Iterable[str | bytes]) -> History:
    """Read a history from lines of `metrics.jsonl`. A long run, too large for memory, is thinned:
    only every n-th step is kept, and windows are merged."""
    kept = _Thinned()
    ranks: deque[str | bytes] = deque(maxlen=NEWEST)
    windows: list[HistoryWindow] = []
    evaluations: list[Evaluation] = []
    events: deque[HistoryEvent] = deque(maxlen=MOST_EVENTS)
    unread, most_windows = 0, 2 * MOST_WINDOWS

    def take(line: str | bytes) -> None:
        told = json.loads(line if isinstance(line, str) else line.decode(errors="replace"))
        name = told["event"]
        if name == "step":
            needed = {name: _needed(told, name) for name in ("loss", "step_s")}
            steps.append(_record(StepRecord, told, step=_whole(told, "step"), **needed))
        elif name == "evaluation":
            evaluations.append(Evaluation(_whole(told, "step"), _needed(told, "loss")))
        elif name == "classes":
            classes = tuple(_record(ClassRecord, one) for one in _list(told["classes"]))
            windows.append(HistoryWindow(_whole(told, "step"), classes))
        elif name == "ranks":
            newest.append(tuple(_record(RankRecord, one) for one in _list(told["ranks"])))
        elif name != RUN_FIGURES:  # they are computed again
            events.append(_parse_event(told))

    steps: list[StepRecord] = []
    newest: list[tuple[RankRecord, ...]] = []
    for line in _order_lines(lines, kept, ranks):
        try:
            take(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            unread += bool(line.strip())
        if len(windows) > most_windows:
            older, newest_windows = windows[:-FIGURE_STEPS], windows[-FIGURE_STEPS:]
            windows = _merged(older) + newest_windows
            most_windows = max(most_windows, 2 * len(windows))
    by_number = {one.step: one for one in steps}  # the last record of a repeated step
    return History(
        steps=tuple(by_number[number] for number in sorted(by_number)),
        evaluations=tuple(evaluations[:: -(len(evaluations) // MOST_WINDOWS + 1)][::-1]),
        windows=tuple(windows),
        ranks=next(reversed(newest), ()),
        events=tuple(events),
        unread=unread,
        every=kept.every,
    )


def _order_lines(
    lines: Iterable[str | bytes], kept: _Thinned, ranks: deque[str | bytes]
) -> Iterator[str | bytes]:
    """Yield the lines to read; the numerous step and rank lines come last, and thinned. Lines are
    recognized by their start."""
    for line in lines:
        begin = line[:_BEGIN]
        if begin in _STEP:
            kept.add(line)
        elif begin in _RANKS:
            ranks.append(line)
        else:
            yield line
    yield from kept.lines()
    yield from ranks


class _Thinned:
    """Every n-th of the added lines, at most twice `MOST_STEPS`, and all of the newest."""

    def __init__(self) -> None:
        self.every = 1
        self._kept: list[str | bytes] = []
        self._count = 0
        self._newest: deque[str | bytes] = deque(maxlen=FIGURE_STEPS)

    def add(self, line: str | bytes) -> None:
        self._newest.append(line)
        if self._count % self.every == 0:
            self._kept.append(line)
            if len(self._kept) > 2 * MOST_STEPS:
                self._kept, self.every = self._kept[::2], 2 * self.every
        self._count += 1

    def lines(self) -> Iterator[str | bytes]:
        older = self._count - len(self._newest)
        yield from self._kept[: -(-older // self.every)]
        yield from self._newest


def _merged(windows: Sequence[HistoryWindow]) -> list[HistoryWindow]:
    """Merge each `TOGETHER` windows with equal classes: means over steps, highest peaks, and
    counters at the end."""
    found: list[HistoryWindow] = []
    before = 0
    for begin in range(0, len(windows), TOGETHER):
        group = windows[begin : begin + TOGETHER]
        ends = [before, *(one.step for one in group)]
        spans = [max(1, end - start) for start, end in pairwise(ends)]
        before = ends[-1]
        kinds = {tuple(c.device_class for c in one.classes) for one in group}
        if len(kinds) > 1:
            found += group
            continue
        classes = (average_windows(every, spans) for every in zip(*(one.classes for one in group)))
        found.append(HistoryWindow(before, tuple(classes)))
    return found


def _parse_event(told: Mapping[str, Any]) -> HistoryEvent:
    name = told["event"]
    if not isinstance(name, str):
        raise TypeError("an event has a name")
    return HistoryEvent(name, _whole(told, "step"), parse_number(told.get("time")), dict(told))


def _record(kind: type[T], told: Any, **known: Any) -> T:
    """Build a record; older runs lack fields, and newer runs may have more."""
    fields = {name: _read_field(hint, told.get(name)) for name, hint in FIELDS[kind].items()}
    return kind(**fields | known)


def _read_field(hint: Any, value: Any) -> Any:
    if hint is str:
        return value if isinstance(value, str) else ""
    if hint == dict[str, int]:
        return _sizes(value)
    if hint == TimeShares | None:
        return _shares(value)
    number = parse_number(value)
    return number or 0 if hint in (int, float) else number


def _shares(told: Any) -> TimeShares | None:
    if not isinstance(told, dict):
        return None
    parts = [parse_number(told.get(name)) for name in SHARE_NAMES]
    return None if None in parts else TimeShares(*[part or 0.0 for part in parts])


def _sizes(told: Any) -> dict[str, int]:
    if not isinstance(told, dict):
        return {}
    return {
        str(name): int(n) for name, size in told.items() if (n := parse_number(size)) is not None
    }


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise TypeError("a list of records is wanted")
    return value


def _needed(told: Mapping[str, Any], key: str) -> float:
    number = parse_number(told[key])
    if number is None:
        raise TypeError(f"'{key}' is no number")
    return number


def _whole(told: Mapping[str, Any], key: str) -> int:
    number = _needed(told, key)
    if number < 0 or number != int(number):
        raise ValueError(f"'{key}' is no whole number")
    return int(number)


def parse_number(value: Any) -> float | None:
    """Return a JSON value as number, if plausible as a measurement: products of a few such numbers
    are finite too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -LARGEST_NUMBER < value < LARGEST_NUMBER else None
