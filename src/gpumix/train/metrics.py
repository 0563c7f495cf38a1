"""What a run tells while it runs: `metrics.jsonl`, `progress.json`, and the numbers in them."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from gpumix.spec.plan import Plan

# Steps whose times make up the speed that is shown.
WINDOW = 20


@dataclass(frozen=True)
class StepRecord:
    """One step, as a line of `metrics.jsonl`."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    step_s: float
    tokens_per_s: float
    tokens: int


@dataclass(frozen=True)
class RankRecord:
    """How one rank did since the last record."""

    device: str
    device_class: str
    busy_share: float
    peak_bytes: int | None
    overruns: int

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
    """Writes a run's files. Only the first rank has one."""

    folder: Path
    plan: Plan
    steps: int
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _file: TextIO | None = None

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def step(self, record: StepRecord) -> None:
        self.recent_s.append(record.step_s)
        self._write("step", asdict(record))

    def classes(self, step: int, records: list[ClassRecord]) -> None:
        self._write("classes", {"step": step, "classes": [asdict(r) for r in records]})

    def evaluation(self, step: int, loss: float) -> None:
        self._write("evaluation", {"step": step, "loss": loss})

    def progress(self, state: str, record: StepRecord | None) -> None:
        """Replace `progress.json`, for whoever watches the run."""
        done = record.step if record is not None else 0
        value = {
            "state": state,
            "step": done,
            "steps": self.steps,
            "loss": record.loss if record is not None else None,
            "tokens_per_s": self.tokens_per_s(),
            "remaining_s": (self.steps - done) * self.step_s(),
            "time": time.time(),
        }
        part = self.folder / ".progress.json.part"
        part.write_text(json.dumps(value) + "\n", encoding="utf-8")
        part.replace(self.folder / "progress.json")

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
