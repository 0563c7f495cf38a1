"""Choice of prefetch settings from measurements. Pure.

Settings are computed from the first batches, not found by trials: enough workers to keep up with
the device, w = cost of a batch / (0.9 device time), enough batches ahead to hide the slowest
samples, and processes where Python computes (see docs/design/loader.md). The result is checked, and
corrected at most twice before a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil, floor
from statistics import median

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.data.workers.fetch import Cost
from gpumix.data.workers.prefetcher import MOST_AHEAD, WHOLE_BATCH_SAMPLES, PrefetchSettings
from gpumix.data.workers.step_timing import TimedStep
from gpumix.data.workers.worker_pool import MOST_WORKERS

MEASURED_STEPS = 6  # steps to measure the device's time
WINDOW = 20  # steps per check
PAUSE_STEPS = 200  # steps between later corrections
TARGET_UTILIZATION = 0.9  # planned share of the workers' capacity
CHEAP = 0.05  # of a step, CPU time a fetching thread may take from the launching thread
CHEAP_S = 1e-3  # per batch: less is not worth a process
HANDOVER_CPU_S = 1e-4  # CPU time of the training process per part of a batch, until measured
HANDED_SHARE = 0.02  # of a step, for the parts of a batch together
HANDOVER_PARTS = 64  # last parts that measure it
UNDER_WAY = 3  # parts per worker, over all batches ahead
THREADS_GAIN = 1.4  # speedup of two threads that counts as parallel in the interpreter
LEAST_AHEAD = 4
FREE = 0.8  # share of cores in use below which workers do not wait for cores
FORGETS = 0.1  # share of earlier measurements replaced by each step
TRIAL_CHUNKS = 4  # chunks in the trial of two threads
AT_FIRST = "one for each core, at first"
DRAWS = "samples draw from this process's generators, so they are read while `next` waits"
DREW = "samples were seen to draw from generators of the process that reads them"
UNEVEN = 2.0  # slowest chunk relative to a batch, from which cost is uneven
UNEVEN_BUSY = 0.6  # planned share of capacity for uneven cost
STARVED_FACTOR = 3.0  # times a starved share, beyond noise
TAIL = 1.2  # times the slowest chunk, to be covered by batches ahead


class Limit(StrEnum):
    """The bottleneck of data loading, if any."""

    DEVICE = "the device: it takes longer than the data"
    CORES = "cores: fetching takes more of them than there are"
    UNKNOWN = "not known yet"


@dataclass(frozen=True)
class Bounds:
    """Limits of prefetch settings.

    Attributes:
        cores: cores for this rank's data: a fraction where ranks share a host.
        processes: whether workers can be processes.
        threads: whether several threads may read the dataset at once.
        memory_bytes: memory for batches ahead.
        kind, workers, ahead: fixed, if not None.
        draws: see `with_random_draws`.
    """

    cores: float
    processes: bool
    threads: bool
    memory_bytes: int
    kind: str | None = None
    workers: int | None = None
    ahead: int | None = None
    draws: bool = False

    def with_random_draws(self) -> Bounds:
        """Return the bounds for samples that draw from generators of the process reading them.
        Worker processes may draw freely; in the training process one thread may, while `next`
        waits."""
        if self.kind == "threads" or self.workers == 0 or not self.processes:
            return replace(self, kind="threads", workers=1, ahead=1, threads=False, draws=True)
        return replace(self, threads=False, draws=True)

    def ahead_for(self, wanted: int, batch_bytes: int) -> int:
        """Return the number of batches to fetch ahead, given the number wanted."""
        room = self.memory_bytes // max(1, batch_bytes)
        return self.ahead or max(1, min(wanted, room, MOST_AHEAD))


@dataclass(frozen=True)
class BatchMeasurements:
    """Measurements of the current batches.

    Attributes:
        rows: rows of a batch, `batch_bytes` in all.
        wall_s, cpu_s: wall-clock and CPU time for one worker to fetch a batch.
        tail_s: time of the slowest chunk seen.
        step_s: device time per batch; 0: unknown.
        threads_gain: speedup of two threads over one; None: not measured.
        handed_s: CPU time of the training process per part of a batch.
    """

    rows: int
    batch_bytes: int
    wall_s: float
    cpu_s: float
    tail_s: float
    step_s: float
    threads_gain: float | None = None
    handed_s: float = HANDOVER_CPU_S

    @property
    def waiting(self) -> float:
        """Wall-clock seconds per CPU second, at least 1: a waiting worker needs no core."""
        return max(1.0, self.wall_s / max(self.cpu_s, 1e-9))


def choose_settings(found: BatchMeasurements, bounds: Bounds, splits: bool) -> PrefetchSettings:
    """Return the settings for the measurements.

    Args:
        splits: whether batches can be fetched in parts.
    """
    # Until the device's time is known, more workers than cores would often be too many.
    waiting = min(found.waiting, MOST_WORKERS) if found.step_s else 1.0
    wanted_s = found.step_s or found.wall_s / max(1.0, bounds.cores)
    useful = floor(bounds.cores * waiting + 0.25)
    useful = max(1, min(MOST_WORKERS, useful))
    # If a few samples take most of the time, quick batches come first and hide the cost.
    busy = UNEVEN_BUSY if found.tail_s > UNEVEN * found.wall_s else TARGET_UTILIZATION
    workers = min(useful, max(1, ceil(found.wall_s / (busy * max(wanted_s, 1e-9)))))
    workers = workers if bounds.workers is None else max(1, bounds.workers)
    kind = bounds.kind or _kind(found, bounds, workers)
    if kind == "threads" and not bounds.threads:
        workers = 1
    step_s = max(wanted_s, found.wall_s / workers, found.cpu_s / max(bounds.cores, 1e-9))
    most_parts = round(HANDED_SHARE * step_s / found.handed_s)
    if found.step_s and found.cpu_s > TARGET_UTILIZATION * bounds.cores * found.step_s:
        # Cores are short, and parts cost CPU time: use the fewest that keep all workers busy.
        fewest = ceil(UNDER_WAY * workers / bounds.ahead_for(MOST_AHEAD, found.batch_bytes))
        most_parts = min(most_parts, fewest)
    parts = max(1, min(found.rows, most_parts)) if splits and workers > 1 else 1
    ahead = max(
        LEAST_AHEAD, ceil(TAIL * found.tail_s / step_s) + 2, ceil(UNDER_WAY * workers / parts) + 1
    )
    if not splits:
        ahead = max(ahead, ceil(2 * TAIL * found.tail_s / step_s) + 2)
    ahead = bounds.ahead_for(ahead, found.batch_bytes)
    chunk = -(-found.rows // parts) if parts > 1 else WHOLE_BATCH_SAMPLES
    return PrefetchSettings(kind, workers, ahead, chunk)  # type: ignore[arg-type]


def _kind(found: BatchMeasurements, bounds: Bounds, workers: int) -> str:
    if not bounds.processes or bounds.workers == 0:
        return "threads"
    if bounds.draws:
        return "processes"
    if found.wall_s < CHEAP_S:
        return "threads"
    if bounds.threads and (found.threads_gain or 0.0) >= THREADS_GAIN:
        return "threads"
    holds = found.cpu_s > CHEAP * (found.step_s or found.wall_s)
    return "processes" if workers > 1 or holds else "threads"


@dataclass
class Tuner:
    """A monitor of steps and chunks that decides when to change settings.

    Attributes:
        reasons: step number and reason of each change so far.
        limit: bottleneck of data loading at the last check.
    """

    bounds: Bounds
    splits: bool
    setting: PrefetchSettings = field(default_factory=PrefetchSettings)
    reasons: list[tuple[int, str]] = field(default_factory=list)
    limit: Limit = Limit.UNKNOWN
    _steps: int = 0
    _begun: int = 0  # steps before the current size of batches
    _jumped: bool = False
    _replanned: bool = False
    _corrections: int = 0
    _moved: int = 0
    _window: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _starved: int = 0
    _solo: tuple[float, float] | None = None  # wall, CPU seconds of a sample for a lone worker
    _samples: int = 0  # samples behind `_solo`
    _gain: float | None = None
    _tried: list[Cost] | None = None  # chunks of the trial of two threads, while it runs
    _handed_s: deque[float] = field(default_factory=lambda: deque(maxlen=HANDOVER_PARTS))
    _rows: int = 0
    _tail_s: float = 0.0

    def __post_init__(self) -> None:
        self.setting = self._pinned()
        if self.bounds.draws and self.bounds.kind == "threads":
            self.reasons.append((0, f"{describe_settings(self.setting)}: {DRAWS}"))

    @property
    def knows(self) -> bool:
        """True once the cost of a batch was measured."""
        return self._solo is not None

    def first(self, costs: Sequence[Cost], rows: int, batch_bytes: int) -> PrefetchSettings:
        """Return the settings after the first batch, fetched by one worker alone; the device's time
        is unknown."""
        self._solo, self._samples = _per_sample(costs), sum(one.samples for one in costs)
        self._tail_s = max((c.wall_s for c in costs), default=0.0)
        self._rows = rows
        found = self._measured(batch_bytes, 0.0)
        if not rows or (found.wall_s < CHEAP_S and not self.bounds.draws):
            return self.setting
        if self.bounds.threads and self.bounds.kind is None and self.bounds.workers is None:
            self._tried = []
            two = replace(self.setting, workers=2)
            return self._move(two, "to see whether two compute at once")
        return self._move(choose_settings(found, self.bounds, self.splits), AT_FIRST)

    def replanned(self, bounds: Bounds, rows: int, batch_bytes: int) -> PrefetchSettings:
        """Return the settings for batches of `rows` rows, within new bounds. The cost of samples
        stays known; the device's time does not, and workers are kept until measured again."""
        before = self._rows
        now_bytes = batch_bytes * rows // max(1, before)
        self.bounds, self._rows, self._replanned = bounds, rows, True
        self._begun, self._jumped, self._corrections, self._starved = self._steps, False, 0, 0
        self._window.clear()
        parts = -(-before // self.setting.chunk) if before else 1
        self.setting = replace(
            self.setting,
            ahead=min(self.setting.ahead, bounds.ahead_for(MOST_AHEAD, now_bytes)),
            chunk=max(1, -(-rows // parts)) if parts > 1 else WHOLE_BATCH_SAMPLES,
        )
        return self.setting

    def step(self, step: TimedStep, costs: Sequence[Cost], batch_bytes: int) -> PrefetchSettings:
        """Return the settings after a step."""
        self._steps += 1
        self._window.append(step)
        if self._tried is not None:
            return self._try(costs, batch_bytes)
        self._learn(costs)
        if self._steps - self._begun >= MEASURED_STEPS and not self._jumped:
            self._jumped = True
            return self._move(self._jump(batch_bytes), "for the device's step time")
        if self._jumped and len(self._window) == WINDOW:
            self._look(batch_bytes)
            self._window.clear()
        return self.setting

    def apply_draws(self, bounds: Bounds, batch_bytes: int) -> PrefetchSettings:
        """Return the settings after samples were first seen to draw from generators of the process,
        within bounds for such samples. The device's time is measured again."""
        self.bounds, self._tried = bounds, None
        if self.setting.kind == "processes":
            return self.setting  # each worker adapts by itself
        self._begun, self._jumped = self._steps, False
        if not self.knows or bounds.kind == "threads":
            wanted = self._pinned()
        else:
            wanted = choose_settings(self._measured(batch_bytes, 0.0), bounds, self.splits)
        return self._move(wanted, DRAWS if bounds.kind == "threads" else DREW)

    # -- inside ------------------------------------------------------------------------------------

    def _pinned(self) -> PrefetchSettings:
        """Return the settings, with fixed values applied."""
        pins = {key: getattr(self.bounds, key) for key in ("kind", "workers", "ahead")}
        given = {key: pin for key, pin in pins.items() if pin is not None}
        if "workers" in given:
            given["workers"] = max(1, given["workers"])
        setting = replace(self.setting, **given)
        if setting.kind == "threads" and not self.bounds.threads:
            return replace(setting, workers=1)
        return setting

    def _jump(self, batch_bytes: int) -> PrefetchSettings:
        found = self._measured(batch_bytes, self._device_s())
        wanted = choose_settings(found, self.bounds, self.splits)
        if self._replanned and self.setting.kind == "processes":
            return replace(wanted, kind="processes")  # they exist, whatever a batch costs now
        return wanted

    def _try(self, costs: Sequence[Cost], batch_bytes: int) -> PrefetchSettings:
        """Continue the trial of two threads: their time in parallel shows if they wait for the
        interpreter."""
        assert self._tried is not None and self._solo is not None, "they are tried"
        self._tried += costs
        if len(self._tried) < TRIAL_CHUNKS:
            return self.setting
        self._gain = 2.0 * self._solo[0] / max(_per_sample(self._tried[:TRIAL_CHUNKS])[0], 1e-9)
        self._tried = None
        found = self._measured(batch_bytes, 0.0)
        return self._move(choose_settings(found, self.bounds, self.splits), AT_FIRST)

    def _learn(self, costs: Sequence[Cost]) -> None:
        if not costs:
            return
        self._handed_s.extend(one.handed_s for one in costs if one.handed_s)
        self._tail_s = max(0.99 * self._tail_s, *(c.wall_s for c in costs))
        wall_s, cpu_s = _per_sample(costs)
        if self._solo is None:
            self._solo = wall_s, cpu_s
            return
        # Few samples may take most of the time, so average over all samples; after the jump to the
        # device's step time, forget old measurements.
        samples = sum(one.samples for one in costs)
        self._samples += samples
        new = max(FORGETS if self._jumped else 0.0, samples / max(1, self._samples))
        before_wall_s, before_cpu_s = self._solo
        waiting_s = max(0.0, before_wall_s - before_cpu_s)
        # If workers wait for cores, wall-clock time exceeds that of a lone worker.
        used = self.setting.workers * cpu_s / max(wall_s, 1e-9)
        if used < FREE * self.bounds.cores:
            waiting_s += new * (max(0.0, wall_s - cpu_s) - waiting_s)
        now_cpu_s = before_cpu_s + new * (cpu_s - before_cpu_s)
        self._solo = now_cpu_s + waiting_s, now_cpu_s

    def _measured(self, batch_bytes: int, step_s: float) -> BatchMeasurements:
        wall_s, cpu_s = self._solo or (0.0, 0.0)
        rows = self._rows
        return BatchMeasurements(
            rows=rows,
            batch_bytes=batch_bytes,
            wall_s=rows * wall_s,
            cpu_s=rows * cpu_s,
            tail_s=self._tail_s,
            step_s=step_s,
            threads_gain=self._gain,
            handed_s=median(self._handed_s) if self._handed_s else HANDOVER_CPU_S,
        )

    def _device_s(self) -> float:
        return median(step.device_s for step in self._window)

    def _look(self, batch_bytes: int) -> None:
        """Check if the device waited for data in the last steps, and correct the settings if
        useful."""
        waited_s = sum(step.waited_s for step in self._window)
        all_s = waited_s + sum(step.device_s for step in self._window)
        share = waited_s / max(all_s, 1e-9)
        if share <= MIN_STARVED_SHARE:
            self._starved, self.limit = 0, Limit.DEVICE
            return
        found = self._measured(batch_bytes, self._device_s())
        self._starved += 1
        cores_s = found.cpu_s / max(self.bounds.cores, 1e-9)
        short = cores_s > TARGET_UTILIZATION * all_s / len(self._window)
        self.limit = Limit.CORES if short else Limit.UNKNOWN
        if self._corrections >= 2 and self._steps - self._moved < PAUSE_STEPS:
            return
        if short:
            self._correct(
                choose_settings(found, self.bounds, self.splits), "samples take another time"
            )
        elif self._starved >= 2 or share > STARVED_FACTOR * MIN_STARVED_SHARE:
            self._correct(self._more(found), f"the device waited {share:.0%} of the time")

    def _more(self, found: BatchMeasurements) -> PrefetchSettings:
        """Return settings with more of the scarce resource: batches ahead if most arrive in time,
        otherwise workers."""
        wanted = choose_settings(found, self.bounds, self.splits)
        now = self.setting
        ready = sum(step.ready for step in self._window) / len(self._window)
        if ready > 0.5 and self.bounds.ahead is None:
            ahead = max(now.ahead, self.bounds.ahead_for(2 * now.ahead, found.batch_bytes))
            return replace(wanted, ahead=ahead, workers=max(wanted.workers, now.workers))
        if self.bounds.workers is None and (wanted.kind == "processes" or self.bounds.threads):
            workers = min(MOST_WORKERS, max(wanted.workers, ceil(1.5 * now.workers)))
            ahead = self.bounds.ahead_for(max(wanted.ahead, workers + 2), found.batch_bytes)
            return replace(wanted, workers=workers, ahead=ahead)
        return wanted

    def _correct(self, wanted: PrefetchSettings, why: str) -> None:
        self._corrections += wanted != self.setting
        self._move(wanted, why)

    def _move(self, wanted: PrefetchSettings, why: str) -> PrefetchSettings:
        if wanted != self.setting:
            self._moved = self._steps
            self._starved = 0
            self._window.clear()
            self.reasons.append((self._steps, f"{describe_settings(wanted)}: {why}"))
            self.setting = wanted
        return self.setting


def describe_settings(setting: PrefetchSettings) -> str:
    """Describe settings in words."""
    one = setting.workers == 1
    what = {"threads": "thread", "processes": "process"}[setting.kind]
    plural = "" if one else "es" if what == "process" else "s"
    return f"{setting.workers} {what}{plural}, {setting.ahead} batches ahead"


def _per_sample(costs: Sequence[Cost]) -> tuple[float, float]:
    samples = max(1, sum(c.samples for c in costs))
    return sum(c.wall_s for c in costs) / samples, sum(c.cpu_s for c in costs) / samples
