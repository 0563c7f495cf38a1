"""What a run tells while it runs: `metrics.jsonl`, `progress.json`, and the numbers in them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from gpumix.spec.errors import Interrupted
from gpumix.spec.plan import Plan
from gpumix.train import run_files

# Steps whose times make up the speed that is shown.
WINDOW = 20


@dataclass(frozen=True)
class StepRecord:
    """One step, as a line of `metrics.jsonl`."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    step_s: float
    tokens_per_s: float
    tokens: int


@dataclass(frozen=True)
class RankRecord:
    """How one rank did since the last record; bytes are those that it sent in a step."""

    device: str
    device_class: str
    busy_share: float
    peak_bytes: int | None
    overruns: int
    sent_bytes: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        return cls(**json.loads(text))


@dataclass
class ClassRecord:
    """How the devices of one class did: mean busy share, highest peak against the plan."""

    device_class: str
    devices: int
    samples: int
    busy_share: float
    peak_bytes: int | None
    planned_peak_bytes: int | None
    overruns: int


def by_class(plan: Plan, records: list[RankRecord]) -> list[ClassRecord]:
    """The ranks' records put together by class, in the plan's order."""
    planned = {w.device: w.peak_bytes for w in plan.prediction.workers} if plan.prediction else {}
    found: dict[str, ClassRecord] = {}
    for worker, record in zip(plan.workers, records):
        known = found.setdefault(
            worker.device_class,
            ClassRecord(worker.device_class, 0, 0, 0.0, None, None, 0),
        )
        known.busy_share = (known.busy_share * known.devices + record.busy_share) / (
            known.devices + 1
        )
        known.devices += 1
        known.samples += worker.samples
        known.overruns += record.overruns
        known.peak_bytes = _larger(known.peak_bytes, record.peak_bytes)
        known.planned_peak_bytes = _larger(known.planned_peak_bytes, planned.get(worker.device))
    return list(found.values())


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


@dataclass
class RunLog:
    """Writes a run's files while its `with` block runs. Only the first rank has one.

    `done` is the last step: at first the one that the run goes on from. Records of later steps,
    which a run wrote that died without saving them, are dropped, so that no step is there twice.
    """

    folder: Path
    plan: Plan
    steps: int
    done: int = 0
    loss: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _file: TextIO | None = None

    def __enter__(self) -> RunLog:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / run_files.METRICS
        _replace(path, "".join(_until(path, self.done)) if self.done else "")
        self._file = path.open("a", encoding="utf-8")
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
            with suppress(OSError):  # a full disk must not hide the error
                self.progress("interrupted" if isinstance(error, Interrupted) else "failed")
        self._file.close()

    def step(self, record: StepRecord) -> None:
        self.done, self.loss = record.step, record.loss
        self.recent_s.append(record.step_s)
        self._write("step", asdict(record))
        self.progress("training")

    def classes(self, step: int, records: list[ClassRecord]) -> None:
        self._write("classes", {"step": step, "classes": [asdict(r) for r in records]})

    def evaluation(self, step: int, loss: float) -> None:
        self._write("evaluation", {"step": step, "loss": loss})

    def progress(self, state: str) -> None:
        """Replace `progress.json`, for whoever watches the run."""
        value = {
            "state": state,
            "step": self.done,
            "steps": self.steps,
            "loss": self.loss,
            "tokens_per_s": self.tokens_per_s(),
            "step_s": self.step_s(),
            "predicted_step_s": self.predicted_step_s,
            "remaining_s": (self.steps - self.done) * self.step_s(),
            "time": time.time(),
        }
        _replace(self.folder / run_files.PROGRESS, json.dumps(value) + "\n")

    @property
    def predicted_step_s(self) -> float | None:
        return self.plan.prediction.step_s if self.plan.prediction is not None else None

    def step_s(self) -> float:
        """Median seconds of the recent steps, 0 before the first."""
        times = sorted(self.recent_s)
        return times[len(times) // 2] if times else 0.0

    def tokens_per_s(self) -> float:
        step_s = self.step_s()
        return self.plan.global_batch * self.plan.sequence_length / step_s if step_s else 0.0

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")
        self._file.flush()


def _until(path: Path, step: int) -> Iterator[str]:
    """The lines of a former run up to a step; the last one may have been cut short."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            with suppress(ValueError, KeyError):
                if json.loads(line)["step"] <= step:
                    yield line


def _replace(path: Path, text: str) -> None:
    """Write a file in one step, so that no reader finds half of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
