"""Writer of a run's `metrics.jsonl` and `progress.json`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO

from gpumix.schema.errors import Interrupted, MachineError, get_first_line
from gpumix.schema.file_errors import describe_write_fix
from gpumix.schema.files import (
    copy_bytes,
    iterate_lines,
    iterate_lines_from_end,
    open_for_reading,
    open_log,
    replace_atomically,
    write_text_atomically,
)
from gpumix.schema.plan.plan import Plan
from gpumix.train.run_figures.figures import RESTART_EVENT, RunFigures
from gpumix.train.run_figures.history import (
    FIGURE_STEPS,
    RUN_FIGURES,
    History,
    HistoryEvent,
    HistoryWindow,
    load_history,
)
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import ClassRecord, RankRecord, RunEvent, StepRecord

_OF_STEP = b'"step"'  # in the line of a step event


@dataclass
class RunLog:
    """Writer of a run's files during its `with` block; only on the first rank.

    `steps` is the number of steps; None if unknown, and progress has no end. `done` is the last
    step, initially the step to resume from. Records of later steps, written by a run that died
    without saving, are dropped: no step appears twice. The newest records are kept, so that
    `figures` are those that readers of the files compute.
    """

    folder: Path
    plan: Plan
    steps: int | None
    done: int = 0
    loss: float | None = None
    _steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=FIGURE_STEPS))
    _windows: deque[HistoryWindow] = field(default_factory=lambda: deque(maxlen=FIGURE_STEPS))
    _events: deque[HistoryEvent] = field(default_factory=lambda: deque(maxlen=FIGURE_STEPS))
    _figures: RunFigures | None = None
    _file: TextIO | None = None
    _told_of_starvation: bool = False
    _rule: str = ""

    def __enter__(self) -> RunLog:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / run_files.METRICS
        with replace_atomically(path) as file:
            if self.done:
                _copy_until(path, self.done, file)
        if self.done:
            self._remember(load_history(self.folder))
        self._file = open_log(path)
        self.progress("training")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        if error is None:
            self.progress("finished")
        else:
            with suppress(MachineError):  # a full disk must not hide the error
                if isinstance(error, Interrupted):
                    self.progress("interrupted", error.what)
                else:
                    self.progress("failed", get_first_line(error))
        with suppress(OSError):  # retries what failed before
            self._file.close()

    def step(self, record: StepRecord) -> None:
        self.done, self.loss = record.step, record.loss
        self._steps.append(record)
        self._figures = None
        self._write("step", asdict(record))
        self.progress("training")

    def classes(self, step: int, records: list[ClassRecord]) -> None:
        """Record the classes since the last such record, and the figures so far."""
        self._windows.append(HistoryWindow(step, tuple(records)))
        self._figures = None
        self._write("classes", {"step": step, "classes": [asdict(r) for r in records]})
        self._write(RUN_FIGURES, {"step": step, **self.figures.as_dict()})

    def ranks(self, step: int, records: list[RankRecord]) -> None:
        self._write("ranks", {"step": step, "ranks": [asdict(r) for r in records]})

    def report_starvation(self, step: int, records: list[RankRecord]) -> bool:
        """Report devices idle for lack of data, once per run; return True if reported now."""
        told = [
            {"device": r.device, "share": r.starved_share, "limit": r.input_limit}
            for r in records
            if r.starved_share is not None
        ]
        if not told or self._told_of_starvation:
            return False
        self._told_of_starvation = True
        self._write("input-bound", {"step": step, "ranks": told})
        return True

    def evaluation(self, step: int, loss: float) -> None:
        self._write("evaluation", {"step": step, "loss": loss})

    def checkpoint(self, step: int, path: Path, *, seconds: float, stalled_s: float) -> None:
        """Record the checkpoint of a step; training stopped for `stalled_s`."""
        fields = {"path": str(path), "seconds": seconds, "stalled_s": stalled_s}
        self._write("checkpoint", {"step": step, **fields})

    def restart(
        self, step: int, *, resumed_from: int, kept_in: str, why: str, decided: str, seconds: float
    ) -> None:
        """Record a restart, with the seconds until the first step after it was done.

        Args:
            kept_in: where the resumed state was: memory or disk; empty for none.
        """
        told = {"why": why, "decided": decided, "seconds": seconds}
        told |= {"resumed_from": resumed_from, "kept_in": kept_in}
        self.tell(step, RunEvent(RESTART_EVENT, told, ""))

    def reduction(self, step: int, rule: str) -> None:
        """Record the rule adding up the losses of micro-batches, if it changed."""
        if rule and rule != self._rule:
            self._rule = rule
            self._write("losses", {"step": step, "rule": rule})

    def tell(self, step: int, told: RunEvent) -> None:
        """Record a finding or an action after a step."""
        self._events.append(HistoryEvent(told.event, step, None, told.fields))
        self._figures = None
        self._write(told.event, {"step": step, **told.fields})

    def progress(self, state: str, why: str = "") -> None:
        """Replace `progress.json` for watchers of the run; `why` is the reason of an early end."""
        value = {
            "state": state,
            "why": why,
            "step": self.done,
            "steps": self.steps,
            "loss": self.loss,
            **self.figures.as_dict(),
            "time": time.time(),
        }
        if state == "finished":  # also before all steps are done
            value["remaining_s"] = 0.0
        path = self.folder / run_files.PROGRESS
        with _raise_unwritable(path):
            write_text_atomically(path, json.dumps(value) + "\n")

    @property
    def figures(self) -> RunFigures:
        if self._figures is None:
            self._figures = RunFigures(self.history, self.plan, self.steps)
        return self._figures

    @property
    def history(self) -> History:
        """The newest records."""
        steps, windows = tuple(self._steps), tuple(self._windows)
        return History(steps=steps, windows=windows, events=tuple(self._events))

    def _remember(self, history: History) -> None:
        """Take over the records of earlier starts."""
        self._steps.extend(history.steps)
        self._windows.extend(history.windows)
        self._events.extend(history.events)
        self.loss = history.steps[-1].loss if history.steps else None

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        assert self._file is not None
        with _raise_unwritable(self.folder / run_files.METRICS):
            self._file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")
            self._file.flush()


@contextmanager
def _raise_unwritable(file: Path) -> Iterator[None]:
    """Raise MachineError if `file` cannot be written."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            "cannot write what the run tells of itself",
            code="run-file-not-writable",
            where=str(file),
            why=error.strerror or str(error),
            fix=f"{describe_write_fix(error)}; then run the same command again, with --resume if a "
            "checkpoint was saved",
        ) from error


def append_event(folder: Path, step: int, told: RunEvent) -> None:
    """Append a later finding to the `metrics.jsonl` of an ended run."""
    line = json.dumps({"event": told.event, "time": time.time(), "step": step, **told.fields})
    with open_log(folder / run_files.METRICS) as file:
        file.write(line + "\n")


def _copy_until(path: Path, step: int, into: BinaryIO) -> None:
    """Copy the lines of a former run up to a step; the last line may be cut short.

    Steps are in order, so only the end of a long file is searched. Records of concurrent work, such
    as a slow checkpoint, may follow later.
    """
    with suppress(FileNotFoundError), open_for_reading(path) as file:
        begin = _end_of_step(file, step)
        file.seek(0)
        copy_bytes(file, into, begin)
        for line in iterate_lines(file):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    into.write(line)


def _end_of_step(file: BufferedReader, step: int) -> int:
    """Return the end of the line of the last step up to `step`; 0 without such a line."""
    for begin, line in iterate_lines_from_end(file):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            told = json.loads(line) if _OF_STEP in line else {}
            if told.get("event") == "step" and told["step"] <= step:
                return begin + len(line)
    return 0
