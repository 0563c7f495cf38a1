"""What a run tells while it runs: `metrics.jsonl`, `progress.json`, and the numbers in them.

Tokens a second mean one thing everywhere: the tokens of samples, without padding where it is known
what that is, over the time of a typical step (the median). They differ in which steps and whose
samples they are of; docs/design/efficiency.md lists that.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, TextIO

from gpumix.cost.parts import PARTS
from gpumix.spec.errors import Interrupted, MachineError, first_line
from gpumix.spec.files import (
    copy_bytes,
    how_to_write,
    lines_from_end,
    lines_in,
    opened,
    opened_log,
    replacing,
    write_at_once,
)
from gpumix.spec.peak import Peak
from gpumix.spec.plan import Plan, WorkerPrediction
from gpumix.train import run_files
from gpumix.train.account import Shares

# Steps whose times make up the speed that is shown.
WINDOW = 20
# Up to which part of it FLOPs may be uncertain that utilisation is told of.
APART = 0.05
_OF_STEP = b'"step"'  # in the line of one
WARM_UP_STEPS = 2  # not counted in a run's speed: allocators and caches fill


def typical_s(times: Iterable[float]) -> float:
    """The median, one of them; 0 of none."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2] if ordered else 0.0


@dataclass(frozen=True)
class Told:
    """What is to be said: an event of `metrics.jsonl` with its fields, and a line, if people are to
    see it."""

    event: str
    fields: dict[str, Any]
    text: str


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
    shares: Shares | None = None  # of the rank that writes it
    samples: int = 0  # of the plan's batch


@dataclass(frozen=True)
class RankRecord:
    """How one rank did since the last record; bytes are those that it sent in a step.

    `laid_out_bytes` lie on its device between steps; what `peak_bytes` are more is for samples.
    `reserved_bytes` are the most that its allocator held, and `retries` count how often that had to
    give memory back to the driver to get some; both since the run began. `sm_mhz` is the clock of
    its multiprocessors.
    `shares` say what its steps were spent on, and `starved_share` is set once its device was found
    to stand idle for its data; `input_limit` is what holds that data back, as its loader sees it.
    `skipped` counts the samples that it could not read so far, in training each time and in
    evaluations once; `lost_workers` its processes for the data that died or were stuck.
    `not_copied` is why its state is not copied into memory any more, `saved_in_place` why it waits
    until its checkpoints are written. MFU and HFU are None where FLOPs or peak are not known: also
    where samples are much shorter than the plan has them, for what is counted of a full one tells
    not what attention is of that.
    """

    device: str
    device_class: str
    busy_share: float
    peak_bytes: int | None
    overruns: int
    laid_out_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0
    sm_mhz: float | None = None
    sent_bytes: float = 0.0
    shares: Shares | None = None
    starved_share: float | None = None
    input_limit: str = ""
    skipped: int = 0
    lost_workers: int = 0
    not_copied: str = ""
    saved_in_place: str = ""
    tokens_per_s: float = 0.0
    mfu: float | None = None
    hfu: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        told = json.loads(text)
        shares = told.pop("shares")
        return cls(**told, shares=None if shares is None else Shares(**shares))


class Speed(NamedTuple):
    """Of one rank; see `RankRecord`. Of a team each rank has its part of the tokens, of stages each
    has all that pass through it."""

    tokens_per_s: float = 0.0
    mfu: float | None = None
    hfu: float | None = None


class Part(NamedTuple):
    """What was computed, as a part of the plan's samples of full length: if all goes by the tokens,
    and if all goes by their square, as attention's scores do. The truth is between both."""

    by_tokens: float = 1.0
    by_squares: float = 1.0

    @classmethod
    def of(cls, computed: Iterable[tuple[int, int | None]], samples: int, length: int) -> Part:
        """
        Args:
            computed: samples and the tokens of each, padded; see `Engine`.
            samples: of the rank in the plan, of `length` tokens each.
        """
        if not samples:
            return cls()
        widths = [(count, 1.0 if n is None else n / length) for count, n in computed]
        return cls(
            sum(count * width for count, width in widths) / samples,
            sum(count * width**2 for count, width in widths) / samples,
        )

    @classmethod
    def mean(cls, parts: Sequence[Part]) -> Part:
        return cls(*map(fmean, zip(*parts)))

    @property
    def known(self) -> float | None:
        """None where both are too far apart."""
        low, high = sorted(self)
        return (low + high) / 2 if high - low <= APART * high else None


ALL_PLANNED = Part()


def speed_of(
    plan: Plan, rank: int, step_s: float, tokens: float, part: Part = ALL_PLANNED
) -> Speed:
    """A rank's speed, by its typical step, and the tokens of the samples that it has in a step, of
    which `part` was computed of all that is planned."""
    if step_s <= 0:
        return Speed()
    worker = plan.workers[rank]
    team = len(plan.team_of(rank, plan.stages_of(rank)[0]))
    tokens_per_s = tokens / team / step_s
    expected, peak = plan.expected_of(rank), _peak_of(plan, worker.device_class)
    if (done := part.known) is None:
        return Speed(tokens_per_s)
    used = utilisation(expected, peak, step_s)
    return Speed(tokens_per_s, *(None if one is None else one * done for one in used))


def utilisation(
    expected: WorkerPrediction | None, peak: Peak | None, step_s: float
) -> tuple[float | None, float | None]:
    """MFU and HFU of a device that does in a step of `step_s` what is expected of it; None where
    FLOPs or peak are not known."""
    if expected is None or peak is None or step_s <= 0:
        return None, None
    most = step_s * peak.flops_per_s
    model, hardware = expected.model_flops, expected.hardware_flops
    return None if model is None else model / most, None if hardware is None else hardware / most


def _peak_of(plan: Plan, name: str) -> Peak | None:
    """Of a class, where it is known."""
    return None if plan.prediction is None else plan.prediction.peaks.get(name)


@dataclass(frozen=True)
class ClassRecord:
    """How the devices of one class did: means over them, highest peak against the plan.

    `planned_memory` is what the plan expects of the fullest of them, by cause, `measured_memory`
    what was found on the fullest one, by `cost.parts.PARTS`; both are of the run since its start,
    so of a plan that was split anew since it is the fullest split that counts. `reserved_bytes` are
    the most of a device, `retries` those of all; see `RankRecord`. `peak_source` says
    where the peak comes from that MFU and HFU are parts of.
    """

    device_class: str
    devices: int
    samples: int
    busy_share: float
    peak_bytes: int | None
    planned_peak_bytes: int | None
    overruns: int
    planned_memory: dict[str, int] = field(default_factory=dict)
    measured_memory: dict[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    retries: int = 0
    shares: Shares | None = None
    tokens_per_s: float = 0.0  # of one device
    mfu: float | None = None
    hfu: float | None = None
    peak_source: str = ""


def by_class(
    plan: Plan, records: list[RankRecord], fullest: Mapping[str, WorkerPrediction] | None = None
) -> list[ClassRecord]:
    """The ranks' records put together by class, in the plan's order.

    `fullest` are the devices that memory is planned for: those of `plan`, unless the run had other
    plans since it started.
    """
    members: dict[str, list[int]] = {}
    for rank, worker in enumerate(plan.workers):
        members.setdefault(worker.device_class, []).append(rank)
    planned = fullest_by_class(plan) if fullest is None else fullest
    return [
        _class_record(plan, name, ranks, records, planned.get(name))
        for name, ranks in members.items()
    ]


def fullest_by_class(
    plan: Plan, before: Mapping[str, WorkerPrediction] | None = None
) -> dict[str, WorkerPrediction]:
    """What is planned of the device with the highest peak of each class, by this plan or `before`;
    without classes of which nothing is."""
    fullest = dict(before or {})
    for rank, worker in enumerate(plan.workers):
        expected, most = plan.expected_of(rank), fullest.get(worker.device_class)
        if expected is not None and (most is None or expected.peak_bytes > most.peak_bytes):
            fullest[worker.device_class] = expected
    return fullest


def _class_record(
    plan: Plan,
    name: str,
    ranks: list[int],
    records: list[RankRecord],
    fullest: WorkerPrediction | None,
) -> ClassRecord:
    told = [records[rank] for rank in ranks]
    peak = _peak_of(plan, name)
    return ClassRecord(
        device_class=name,
        devices=len(ranks),
        samples=sum(plan.workers[rank].samples for rank in ranks),
        busy_share=fmean(one.busy_share for one in told),
        peak_bytes=_most([one.peak_bytes for one in told]),
        planned_peak_bytes=None if fullest is None else fullest.peak_bytes,
        overruns=sum(one.overruns for one in told),
        planned_memory={} if fullest is None else fullest.memory_bytes,
        measured_memory=_measured_memory(told),
        reserved_bytes=_most([one.reserved_bytes for one in told]),
        retries=sum(one.retries for one in told),
        shares=_mean_shares([one.shares for one in told]),
        tokens_per_s=fmean(one.tokens_per_s for one in told),
        mfu=_mean([one.mfu for one in told]),
        hfu=_mean([one.hfu for one in told]),
        peak_source="" if peak is None else peak.source,
    )


def _measured_memory(told: Sequence[RankRecord]) -> dict[str, int]:
    """Of the one with the highest peak; nothing where that is not known."""
    known = [
        (one.peak_bytes, one.laid_out_bytes)
        for one in told
        if one.peak_bytes is not None and one.laid_out_bytes is not None
    ]
    if not known:
        return {}
    peak, laid_out = max(known)
    return dict(zip(PARTS, (laid_out, peak - laid_out)))


def _most(values: Sequence[int | None]) -> int | None:
    """Of those that are known."""
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _mean_shares(every: Sequence[Shares | None]) -> Shares | None:
    known = [asdict(shares) for shares in every if shares is not None]
    if len(known) < len(every):
        return None
    return Shares(**{name: fmean(one[name] for one in known) for name in known[0]})


@dataclass
class RunLog:
    """Writes a run's files while its `with` block runs. Only the first rank has one.

    `steps` is how many there will be, None where nobody knows: the progress then has no end.
    `done` is the last step: at first the one that the run goes on from. Records of later steps,
    which a run wrote that died without saving them, are dropped, so that no step is there twice.
    """

    folder: Path
    plan: Plan
    steps: int | None
    done: int = 0
    loss: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    recent_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _file: TextIO | None = None
    _told_of_starvation: bool = False
    _rule: str = ""

    def __enter__(self) -> RunLog:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / run_files.METRICS
        with replacing(path) as file:
            if self.done:
                _copy_until(path, self.done, file)
        self._file = opened_log(path)
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
                    self.progress("failed", first_line(error))
        with suppress(OSError):  # what it did not take before is tried again
            self._file.close()

    def step(self, record: StepRecord) -> None:
        self.done, self.loss = record.step, record.loss
        self.recent_s.append(record.step_s)
        self.recent_tokens.append(record.tokens_per_s * record.step_s)
        self._write("step", asdict(record))
        self.progress("training")

    def classes(self, step: int, records: list[ClassRecord]) -> None:
        self._write("classes", {"step": step, "classes": [asdict(r) for r in records]})

    def ranks(self, step: int, records: list[RankRecord]) -> None:
        self._write("ranks", {"step": step, "ranks": [asdict(r) for r in records]})

    def starved(self, step: int, records: list[RankRecord]) -> bool:
        """Whether some ranks' devices stand idle for their data, and that is told now: once in a
        run."""
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
        """That of a step was written; training stood still for it for so long."""
        fields = {"path": str(path), "seconds": seconds, "stalled_s": stalled_s}
        self._write("checkpoint", {"step": step, **fields})

    def restart(
        self, step: int, *, resumed_from: int, kept_in: str, why: str, decided: str, seconds: float
    ) -> None:
        """The run had to start again; it took so long until the first step after that was done.

        Args:
            kept_in: where the state was that it went on from: memory or disk; empty for none.
        """
        told = {"why": why, "decided": decided, "seconds": seconds}
        self._write(
            "restart", {"step": step, "resumed_from": resumed_from, "kept_in": kept_in} | told
        )

    def reduction(self, step: int, rule: str) -> None:
        """By which rule the losses of micro-batches add up, if that is another one than before."""
        if rule and rule != self._rule:
            self._rule = rule
            self._write("losses", {"step": step, "rule": rule})

    def tell(self, step: int, told: Told) -> None:
        """What was found, or done, after a step."""
        self._write(told.event, {"step": step, **told.fields})

    def progress(self, state: str, why: str = "") -> None:
        """Replace `progress.json`, for whoever watches the run; `why` it ended before its time."""
        value = {
            "state": state,
            "why": why,
            "step": self.done,
            "steps": self.steps,
            "loss": self.loss,
            "tokens_per_s": self.tokens_per_s(),
            "step_s": self.step_s(),
            "predicted_step_s": self.predicted_step_s,
            "remaining_s": 0.0 if state == "finished" else self.remaining_s(),
            "time": time.time(),
        }
        path = self.folder / run_files.PROGRESS
        with _in_words(path):
            write_at_once(path, json.dumps(value) + "\n")

    @property
    def predicted_step_s(self) -> float | None:
        return self.plan.prediction.step_s if self.plan.prediction is not None else None

    def step_s(self) -> float:
        """Of the recent steps, 0 before the first."""
        return typical_s(self.recent_s)

    def remaining_s(self) -> float | None:
        """Of the steps that are to come, None where nobody knows how many."""
        return None if self.steps is None else (self.steps - self.done) * self.step_s()

    def tokens_per_s(self) -> float:
        step_s = self.step_s()
        return fmean(self.recent_tokens) / step_s if step_s else 0.0

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        assert self._file is not None
        with _in_words(self.folder / run_files.METRICS):
            self._file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")
            self._file.flush()


@contextmanager
def _in_words(file: Path) -> Iterator[None]:
    """Raises MachineError if `file` cannot be written."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            "cannot write what the run tells of itself",
            where=str(file),
            why=error.strerror or str(error),
            fix=f"{how_to_write(error)}; then run the same command again, with --resume if a "
            "checkpoint was saved",
        ) from error


def tell_afterwards(folder: Path, step: int, told: Told) -> None:
    """Add to the `metrics.jsonl` of a run that has ended what was found out beside it."""
    line = json.dumps({"event": told.event, "time": time.time(), "step": step, **told.fields})
    with opened_log(folder / run_files.METRICS) as file:
        file.write(line + "\n")


def _copy_until(path: Path, step: int, into: BinaryIO) -> None:
    """Copy the lines of a former run up to a step; the last one may have been cut short.

    Steps come in their order, so of a long run only the end is looked into; what is told beside
    them, a checkpoint that was written for a while, may come later.
    """
    with suppress(FileNotFoundError), opened(path) as file:
        begin = _end_of_step(file, step)
        file.seek(0)
        copy_bytes(file, into, begin)
        for line in lines_in(file):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    into.write(line)


def _end_of_step(file: BufferedReader, step: int) -> int:
    """Where the line ends of the last step up to this one; 0 if it is in no line."""
    for begin, line in lines_from_end(file):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            told = json.loads(line) if _OF_STEP in line else {}
            if told.get("event") == "step" and told["step"] <= step:
                return begin + len(line)
    return 0
