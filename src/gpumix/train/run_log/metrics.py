"""Records of a run's metrics: a step, a rank and a device class, as in `metrics.jsonl`.

Tokens per second always mean the tokens of samples, without padding if its amount is known, over
the time of a typical step (the median). `run_figures.figures` says which steps count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import fmean
from typing import Any, NamedTuple

from gpumix.cost.memory_layout.memory_parts import MEMORY_PARTS
from gpumix.schema.peak_flops import Peak
from gpumix.schema.plan.plan import Plan, WorkerPrediction
from gpumix.train.run_log.time_breakdown import TimeShares

# Largest relative uncertainty of FLOPs at which utilization is reported.
MOST_FLOPS_UNCERTAINTY = 0.05
SHARE_NAMES = tuple(one.name for one in fields(TimeShares))
WARM_UP_STEPS = 2  # not counted in a run's speed: allocators and caches fill


def compute_median_s(times: Iterable[float]) -> float:
    """Return the median, always an element (the upper of two); 0 without times."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2] if ordered else 0.0


@dataclass(frozen=True)
class RunEvent:
    """Event of `metrics.jsonl` with fields, and a line of text for people, if any."""

    event: str
    fields: dict[str, Any]
    text: str


@dataclass(frozen=True)
class StepRecord:
    """Line of a step in `metrics.jsonl`."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    step_s: float
    tokens_per_s: float
    tokens: int
    shares: TimeShares | None = None  # of the rank writing the record
    samples: int = 0  # of the plan's batch


@dataclass(frozen=True)
class RankRecord:
    """Measurements of a rank since the last record, without the first steps after a start.

    `busy_share` is the part of the steps' time in which the device computes.
    `sent_bytes` are per step. `laid_out_bytes` lie on the device between steps; the rest of
    `peak_bytes` is for samples. `reserved_bytes` is the most that the allocator reserved, and
    `retries` counts how often it had to return memory to the driver to get more; both since the run
    began. `sm_mhz` is the clock of the device's multiprocessors. `shares` split the time of the
    steps by cause. `starved_share` is set once the device was found idle for lack of data;
    `input_limit` is the loader's bottleneck. `skipped` counts unreadable samples so far, in
    training each time and in evaluations once; `lost_workers` counts data workers that died or
    hung. `not_copied` says why the state is no longer copied into memory, `saved_in_place` why the
    rank waits for its checkpoints to be written. MFU and HFU are None if FLOPs or peak are unknown,
    also if samples are much shorter than planned: the FLOPs of a full sample do not say which part
    is attention.
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
    shares: TimeShares | None = None
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
        return cls(**told, shares=None if shares is None else TimeShares(**shares))


class RankSpeed(NamedTuple):
    """Speed of a rank; see `RankRecord`. Ranks of a tensor-parallel group divide the tokens; each
    pipeline stage counts all tokens passing through."""

    tokens_per_s: float = 0.0
    mfu: float | None = None
    hfu: float | None = None


class ComputedPart(NamedTuple):
    """Computed fraction of the plan's full-length samples: with cost linear in tokens, and with
    quadratic cost like attention scores. The truth lies between both."""

    by_tokens: float = 1.0
    by_squares: float = 1.0

    @classmethod
    def of(
        cls, computed: Iterable[tuple[int, int | None]], samples: int, length: int
    ) -> ComputedPart:
        """Compare computed samples with the rank's planned samples.

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
    def mean(cls, parts: Sequence[ComputedPart]) -> ComputedPart:
        return cls(*map(fmean, zip(*parts)))

    @property
    def known(self) -> float | None:
        """The mean of both fractions; None if they are too far apart."""
        low, high = sorted(self)
        return (low + high) / 2 if high - low <= MOST_FLOPS_UNCERTAINTY * high else None


ALL_PLANNED = ComputedPart()


def speed_of(
    plan: Plan, rank: int, step_s: float, tokens: float, part: ComputedPart = ALL_PLANNED
) -> RankSpeed:
    """Return a rank's speed from its typical step and the tokens of its samples per step. `part` is
    the computed fraction of the planned work."""
    if step_s <= 0:
        return RankSpeed()
    worker = plan.workers[rank]
    tp_size = len(plan.get_tp_group(rank, plan.stages_of(rank)[0]))
    tokens_per_s = tokens / tp_size / step_s
    expected, peak = plan.expected_of(rank), _peak_of(plan, worker.device_class)
    if (done := part.known) is None:
        return RankSpeed(tokens_per_s)
    used = compute_utilization(expected, peak, step_s)
    return RankSpeed(tokens_per_s, *(None if one is None else one * done for one in used))


def compute_utilization(
    expected: WorkerPrediction | None, peak: Peak | None, step_s: float
) -> tuple[float | None, float | None]:
    """Return MFU and HFU of a device doing the expected work in `step_s`; None if FLOPs or peak are
    unknown."""
    if expected is None or peak is None or step_s <= 0:
        return None, None
    most = step_s * peak.flops_per_s
    model, hardware = expected.model_flops, expected.hardware_flops
    return None if model is None else model / most, None if hardware is None else hardware / most


def _peak_of(plan: Plan, name: str) -> Peak | None:
    """Return the peak of a device class; None if unknown."""
    return None if plan.prediction is None else plan.prediction.peaks.get(name)


@dataclass(frozen=True)
class ClassRecord:
    """Measurements of the devices of one class: means, and the highest peak against the plan.
    `overruns` and `retries` are counted since the run's last start.

    `planned_memory` is the prediction for the fullest device, by cause; `measured_memory` is the
    measurement on the fullest device, by `cost.memory_layout.memory_parts.MEMORY_PARTS`. Both cover
    the run since its start: after a rebalance the fullest split counts. `reserved_bytes` is the
    most of a device, `retries` the sum; see `RankRecord`. `peak_source` is the source of the peak
    used for MFU and HFU.
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
    shares: TimeShares | None = None
    tokens_per_s: float = 0.0  # of one device
    mfu: float | None = None
    hfu: float | None = None
    peak_source: str = ""


def by_class(
    plan: Plan, records: list[RankRecord], fullest: Mapping[str, WorkerPrediction] | None = None
) -> list[ClassRecord]:
    """Combine the ranks' records by device class, in the plan's order.

    `fullest` are the predictions of the fullest devices; by default those of `plan`, otherwise of
    all plans since the run started.
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
    """Return the prediction for the fullest device of each class, by this plan or `before`. Classes
    without predictions are left out."""
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
    """Return the memory of the device with the highest peak; empty if unknown."""
    known = [
        (one.peak_bytes, one.laid_out_bytes)
        for one in told
        if one.peak_bytes is not None and one.laid_out_bytes is not None
    ]
    if not known:
        return {}
    peak, laid_out = max(known)
    return dict(zip(MEMORY_PARTS, (laid_out, peak - laid_out)))


def average_windows(records: Sequence[ClassRecord], steps: Sequence[int]) -> ClassRecord:
    """Combine records of one class over windows of so many `steps`: means over the steps, highest
    peaks, all else as in the last record."""

    def mean(name: str) -> float | None:
        return _weighted_mean([(n, getattr(one, name)) for n, one in zip(steps, records)])

    return replace(
        records[-1],
        busy_share=mean("busy_share") or 0.0,
        tokens_per_s=mean("tokens_per_s") or 0.0,
        mfu=mean("mfu"),
        hfu=mean("hfu"),
        peak_bytes=_most([one.peak_bytes for one in records]),
        reserved_bytes=_most([one.reserved_bytes for one in records]),
        shares=_weighted_shares([(n, one.shares) for n, one in zip(steps, records)]),
    )


def _weighted_mean(weighted: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the weighted mean of the known values."""
    known = [(n, value) for n, value in weighted if value is not None]
    steps = sum(n for n, _ in known)
    return sum(n * value for n, value in known) / steps if steps else None


def _weighted_shares(weighted: Sequence[tuple[int, TimeShares | None]]) -> TimeShares | None:
    known = [(n, shares) for n, shares in weighted if shares is not None]
    steps = sum(n for n, _ in known)
    if not steps:
        return None
    return TimeShares(
        *(sum(n * getattr(shares, name) for n, shares in known) / steps for name in SHARE_NAMES)
    )


def _most(values: Sequence[int | None]) -> int | None:
    """Return the largest known value."""
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _mean_shares(every: Sequence[TimeShares | None]) -> TimeShares | None:
    known = [shares for shares in every if shares is not None]
    if len(known) < len(every):
        return None
    return TimeShares(*(fmean(getattr(one, name) for one in known) for name in SHARE_NAMES))
