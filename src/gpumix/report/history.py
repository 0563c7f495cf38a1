"""Contents of `metrics.jsonl`: steps, evaluations, device records and events.

The run may be active, or may have died in the middle of a line, and older runs wrote fewer fields.
Unreadable lines are counted and skipped, missing fields count as unknown.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

from gpumix.schema.units import format_count
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import (
    WARM_UP_STEPS,
    ClassRecord,
    RankRecord,
    StepRecord,
    compute_median_s,
)
from gpumix.train.run_log.time_breakdown import TimeShares

# Limits for long runs; twice as many entries may be kept.
MOST_STEPS, MOST_WINDOWS, MOST_EVENTS, NEWEST = 10_000, 2_000, 10_000, 100
TOGETHER = 8
# Starts of step and rank lines, as written by `RunLog`.
_BEGIN = len('{"event": "step"')
_STEP = ('{"event": "step"', b'{"event": "step"')
_RANKS = ('{"event": "ranks', b'{"event": "ranks')
LARGEST_NUMBER = 1e75
COUNTED = ("overruns", "retries")  # counters since a start

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
    `steps` contains one of `every` steps: 1 except in runs of tens of thousands of steps."""

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    windows: tuple[HistoryWindow, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    events: tuple[HistoryEvent, ...] = ()
    unread: int = 0
    every: int = 1

    def counted(self) -> tuple[StepRecord, ...]:
        """Return the steps relevant for speed: steps by the plan of the last start, without warm-up
        steps after each start, unless no steps remain."""
        another_plan = self.last_other_plan_step
        alike = tuple(one for one in self.steps if one.step > another_plan) or self.steps
        starts = {0, another_plan}
        starts.update(int(r) for e in self.restarts if (r := e.number("resumed_from")))
        cold = {start + n for start in starts for n in range(1, WARM_UP_STEPS + 1)}
        return tuple(one for one in alike if one.step not in cold) or alike

    @property
    def last_other_plan_step(self) -> int:
        """The last step by a plan other than the last start's, or with a batch size other than the
        current size; 0 if none. Rebalancing during the run makes no new plan, since the devices
        keep their work."""
        batches = (one.step for one in self.steps if one.samples != self.steps[-1].samples)
        starts = (e.step for e in self.events if e.event == "plan" and e.told.get("live") is False)
        return max(*batches, *starts, 0, 0)

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
    def restarts(self) -> tuple[HistoryEvent, ...]:
        return tuple(one for one in self.events if one.event == "restart")

    @property
    def step_s(self) -> float | None:
        """Median step time."""
        counted = self.counted()
        return compute_median_s(one.step_s for one in counted) if counted else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of a mean step over the median step time, as reported by the run itself."""
        counted, step_s = self.counted(), self.step_s
        if not counted or not step_s:
            return None
        return fmean(one.tokens_per_s * one.step_s for one in counted) / step_s

    @property
    def classes(self) -> tuple[ClassRecord, ...]:
        """Records of the last window."""
        return self.windows[-1].classes if self.windows else ()

    def over_all(self) -> tuple[ClassRecord, ...]:
        """Return each class's results over all windows by the plan of the last start: means over
        steps and highest peaks, and counters over all windows."""
        return tuple(self._over_all(last) for last in self.classes)

    def _over_all(self, last: ClassRecord) -> ClassRecord:
        before, counts, counted = 0, dict.fromkeys(COUNTED, 0), dict.fromkeys(COUNTED, 0)
        told, another_plan = [], self.last_other_plan_step
        for window in self.windows:
            steps, before = max(1, window.step - before), window.step
            for one in window.classes:
                if one.device_class == last.device_class:
                    if window.step > another_plan:
                        told.append((steps, one))
                    for name in COUNTED:
                        now, last_time = getattr(one, name), counted[name]
                        counts[name] += now - (last_time if now >= last_time else 0)
                        counted[name] = now
        told = told or [(1, last)]
        return replace(
            last,
            busy_share=_mean([(n, c.busy_share) for n, c in told]) or 0.0,
            tokens_per_s=_mean([(n, c.tokens_per_s) for n, c in told]) or 0.0,
            mfu=_mean([(n, c.mfu) for n, c in told]),
            hfu=_mean([(n, c.hfu) for n, c in told]),
            peak_bytes=_most([one.peak_bytes for _, one in told]),
            reserved_bytes=_most([one.reserved_bytes for _, one in told]),
            overruns=counts["overruns"],
            retries=counts["retries"],
            shares=_mean_shares([(n, c.shares) for n, c in told]),
        )


def _most(values: Iterable[int | None]) -> int | None:
    """Return the maximum of the known values."""
    return max((value for value in values if value is not None), default=None)


def _mean(weighed: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the weighted mean of the known values."""
    total, steps = 0.0, 0
    for n, value in weighed:
        if value is not None:
            total, steps = total + n * value, steps + n
    return total / steps if steps else None


def _mean_shares(weighed: Sequence[tuple[int, TimeShares | None]]) -> TimeShares | None:
    known = [(n, shares) for n, shares in weighed if shares is not None]
    if not known:
        return None
    means = {
        name: _mean([(n, getattr(shares, name)) for n, shares in known])
        for name in FIELDS[TimeShares]
    }
    return TimeShares(**{name: value or 0.0 for name, value in means.items()})


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
            steps.append(_step(told))
        elif name == "evaluation":
            evaluations.append(_evaluation(told))
        elif name == "classes":
            windows.append(_window(told))
        elif name == "ranks":
            newest.append(_ranks(told))
        else:
            events.append(_parse_event(told))

    steps: list[StepRecord] = []
    newest: list[tuple[RankRecord, ...]] = []
    for line in _order_lines(lines, kept, ranks):
        try:
            take(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            unread += bool(line.strip())
        if len(windows) > most_windows:
            windows = _merged(windows)
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
    """Every n-th of the added lines, and the last: at most twice `MOST_STEPS`."""

    def __init__(self) -> None:
        self.every = 1
        self._kept: list[str | bytes] = []
        self._count = 0
        self._last: str | bytes = b""

    def add(self, line: str | bytes) -> None:
        self._last = line
        if self._count % self.every == 0:
            self._kept.append(line)
            if len(self._kept) > 2 * MOST_STEPS:
                self._kept, self.every = self._kept[::2], 2 * self.every
        self._count += 1

    def lines(self) -> Iterator[str | bytes]:
        yield from self._kept
        if self.every > 1:
            yield self._last


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
        classes = (_mean_of(every, spans) for every in zip(*(one.classes for one in group)))
        found.append(HistoryWindow(before, tuple(classes)))
    return found


def _mean_of(every: Sequence[ClassRecord], spans: Sequence[int]) -> ClassRecord:
    """Merge records of one class over windows of `spans` steps."""
    return replace(
        every[-1],
        busy_share=_mean([*zip(spans, (one.busy_share for one in every))]) or 0.0,
        tokens_per_s=_mean([*zip(spans, (one.tokens_per_s for one in every))]) or 0.0,
        mfu=_mean([*zip(spans, (one.mfu for one in every))]),
        hfu=_mean([*zip(spans, (one.hfu for one in every))]),
        peak_bytes=_most([one.peak_bytes for one in every]),
        reserved_bytes=_most([one.reserved_bytes for one in every]),
        shares=_mean_shares([*zip(spans, (one.shares for one in every))]),
    )


def _step(told: Mapping[str, Any]) -> StepRecord:
    step_s = _needed(told, "step_s")
    rate = parse_number(told.get("tokens_per_s"))
    return StepRecord(
        step=_whole(told, "step"),
        loss=_needed(told, "loss"),
        learning_rate=parse_number(told.get("learning_rate")) or 0.0,
        gradient_norm=parse_number(told.get("gradient_norm")) or 0.0,
        step_s=step_s,
        tokens_per_s=rate or 0.0,
        tokens=int(parse_number(told.get("tokens")) or 0),
        shares=_shares(told.get("shares")),
        samples=int(parse_number(told.get("samples")) or 0),
    )


def _evaluation(told: Mapping[str, Any]) -> Evaluation:
    return Evaluation(_whole(told, "step"), _needed(told, "loss"))


def _window(told: Mapping[str, Any]) -> HistoryWindow:
    classes = tuple(_record(ClassRecord, one) for one in _list(told["classes"]))
    return HistoryWindow(_whole(told, "step"), classes)


def _ranks(told: Mapping[str, Any]) -> tuple[RankRecord, ...]:
    return tuple(_record(RankRecord, one) for one in _list(told["ranks"]))


def _parse_event(told: Mapping[str, Any]) -> HistoryEvent:
    name = told["event"]
    if not isinstance(name, str):
        raise TypeError("an event has a name")
    return HistoryEvent(name, _whole(told, "step"), parse_number(told.get("time")), dict(told))


NUMERIC = {
    "busy_share", "peak_bytes", "planned_peak_bytes", "laid_out_bytes", "overruns", "devices",
    "samples", "tokens_per_s", "mfu", "hfu", "sent_bytes", "starved_share", "skipped",
    "reserved_bytes", "retries", "sm_mhz",
}  # fmt: skip
OPTIONAL = {
    "peak_bytes", "planned_peak_bytes", "laid_out_bytes", "reserved_bytes", "mfu", "hfu",
    "starved_share", "sm_mhz",
}  # fmt: skip


FIELDS: dict[type, tuple[str, ...]] = {
    one: tuple(field.name for field in fields(one)) for one in (ClassRecord, RankRecord, TimeShares)
}


def _record(cls: type[T], told: Any) -> T:
    """Build a record; older runs lack fields, and newer runs may have more."""
    known: dict[str, Any] = {}
    for name in FIELDS[cls]:
        value = told.get(name)
        if name in NUMERIC:
            number = parse_number(value)
            known[name] = number if name in OPTIONAL else number or 0
        elif name == "shares":
            known["shares"] = _shares(value)
        elif name in ("planned_memory", "measured_memory"):
            known[name] = _sizes(value)
        else:
            known[name] = value if isinstance(value, str) else ""
    return cls(**known)


def _shares(told: Any) -> TimeShares | None:
    if not isinstance(told, dict):
        return None
    parts = [parse_number(told.get(name)) for name in FIELDS[TimeShares]]
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
