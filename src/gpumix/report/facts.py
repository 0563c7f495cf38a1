"""Numbers of a run's report, shared by page, terminal and `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from gpumix.report.cluster import Box, build_cluster_box
from gpumix.report.events import ShownEvent, list_events
from gpumix.report.ranges import Range
from gpumix.report.run import Run
from gpumix.report.speed import RunSpeeds, compute_run_speeds
from gpumix.schema.plan.plan import Plan, WorkerPrediction
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.run_figures.figures import RunFigures, compute_planned_busy
from gpumix.train.run_figures.words import describe_mode
from gpumix.train.run_log.metrics import ClassRecord, compute_utilization
from gpumix.train.run_log.time_breakdown import TimeShares


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one class and stage, with shares of computing and storing.

    `samples` is the sum of the group per step. `stored` is its fraction of the state sharded over
    the stage's workers, None if each worker stores all.
    """

    stage: int
    device_class: str
    devices: int
    hosts: tuple[str, ...]
    samples: int
    samples_each: Range
    computed: float
    stored: float | None
    stored_each: Range
    micro_batch: int
    mode: str
    compute_dtype: str
    state_on: str
    tensor_parallel: int


@dataclass(frozen=True)
class ClassFacts:
    """Predictions and measurements of one device class.

    Memory is for the fullest device, other numbers are means over devices; None means unknown or
    not measured yet. `planned_memory` is by cause, `measured_memory` by distinguishable cause.
    """

    device_class: str
    devices: int
    what: str
    hosts: tuple[str, ...]
    memory_limit_bytes: int | None
    planned_memory: dict[str, int]
    planned_peak_bytes: int | None
    host_bytes: int
    peak_bytes: int | None
    measured_memory: dict[str, int]
    reserved_bytes: int | None
    retries: int
    planned_busy_share: float | None
    busy_share: float | None
    planned_mfu: float | None
    mfu: float | None
    planned_hfu: float | None
    hfu: float | None
    peak_source: str
    tokens_per_s: float | None
    shares: TimeShares | None
    overruns: int


@dataclass(frozen=True)
class RunFacts:
    """All numbers of a run. `left_out` devices are in the cluster but not in the plan."""

    run: Run

    @cached_property
    def answer(self) -> RunSpeeds:
        return compute_run_speeds(self.run)

    @property
    def figures(self) -> RunFigures:
        return self.run.figures

    @cached_property
    def groups(self) -> tuple[DeviceGroup, ...]:
        plan = self.figures.plan_now
        return tuple(
            group
            for number, stage in enumerate(plan.stages)
            for group in group_workers(plan, stage, number)
        )

    @cached_property
    def cluster(self) -> Box:
        return build_cluster_box(self.figures.plan_now, self.run.profile)

    @cached_property
    def classes(self) -> tuple[ClassFacts, ...]:
        return _make_all_class_facts(self.run, self.figures.classes)

    @cached_property
    def events(self) -> tuple[ShownEvent, ...]:
        return list_events(self.run)

    @property
    def emulated(self) -> bool:
        profile = self.run.profile
        return self.run.plan.emulated or (profile is not None and profile.cluster.emulated)

    @property
    def estimated(self) -> tuple[str, ...]:
        """Classes with times estimated from datasheets."""
        return self.run.plan.estimated

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        profile = self.run.profile
        there = () if profile is None else profile.cluster.devices
        used = {worker.device for worker in self.run.plan.workers}
        return tuple(sorted(device.id for device in there if device.id not in used))

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `--json`."""
        run, answer = self.run, self.answer
        return {
            "run": str(run.folder),
            "emulated": self.emulated,
            "estimated": list(self.estimated),
            "plan": run.plan.digest(),
            "strategy": run.plan.strategy,
            "name": run.name,
            "model": run.model,
            "progress": asdict(run.progress),
            "figures": self.figures.as_dict(),
            "next": [asdict(one) for one in run.advice],
            "answer": asdict(answer)
            | {
                "against_even": answer.speedup_over_even,
                "of_ideal": answer.fraction_of_ideal,
            },
            "cluster": asdict(self.cluster),
            "groups": [asdict(group) for group in self.groups],
            "classes": [asdict(one) for one in self.classes],
            "left_out": list(self.left_out),
            "evaluations": [asdict(one) for one in run.history.evaluations],
            "events": [asdict(one) for one in self.events],
            "checkpoints": [name for _, name in run.checkpoints],
            "unread_lines": run.history.unread,
        }


def group_workers(plan: Plan, stage: Stage, number: int) -> list[DeviceGroup]:
    """Group a stage's workers by class and by size of the tensor-parallel group."""
    members: dict[tuple[str, int], list[Worker]] = {}
    for worker in stage.workers:
        members.setdefault((worker.device_class, worker.parts), []).append(worker)
    return [_make_group(plan, stage, number, workers) for workers in members.values()]


def _make_group(plan: Plan, stage: Stage, number: int, workers: list[Worker]) -> DeviceGroup:
    own, first = {worker.device for worker in workers}, workers[0]
    leaders = [tp_group[0] for tp_group in stage.tp_groups if tp_group[0].device in own]
    samples = sum(leader.samples for leader in leaders)
    shares = sum(leader.state_share for leader in leaders)
    hosts = tuple(dict.fromkeys(worker.host for worker in stage.workers))
    return DeviceGroup(
        stage=number,
        device_class=first.device_class,
        devices=len(workers),
        hosts=tuple(dict.fromkeys(worker.host for worker in workers)),
        samples=samples,
        samples_each=Range.of([worker.samples for worker in workers]),
        computed=samples / plan.global_batch,
        # With state replicated per host, shares add up to one on each host.
        stored=shares / (len(hosts) if plan.sharding == "host" else 1) if plan.zero_stage else None,
        # Workers of a tensor-parallel group divide the group's share.
        stored_each=Range.of([stage.stored_by(worker) for worker in workers]),
        micro_batch=max(worker.micro_batch for worker in workers),
        mode=" / ".join(dict.fromkeys(describe_mode(worker.mode) for worker in workers)),
        compute_dtype=first.compute_dtype,
        state_on=first.state_on,
        tensor_parallel=stage.get_tp_size(first),
    )


def _make_all_class_facts(run: Run, measured: Sequence[ClassRecord]) -> tuple[ClassFacts, ...]:
    members: dict[str, list[Worker]] = {}
    for worker in run.plan.workers:
        members.setdefault(worker.device_class, []).append(worker)
    known = {one.device_class: one for one in measured}
    prediction = run.plan.prediction
    told = {} if prediction is None else {one.device: one for one in prediction.workers}
    return tuple(
        _make_class_facts(
            run, workers, [told[w.device] for w in workers if w.device in told], known.get(name)
        )
        for name, workers in members.items()
    )


def _make_class_facts(
    run: Run, workers: list[Worker], planned: list[WorkerPrediction], seen: ClassRecord | None
) -> ClassFacts:
    name, prediction = workers[0].device_class, run.plan.prediction
    fullest = max(planned, key=lambda one: one.peak_bytes, default=None)
    step_s = 0.0 if prediction is None else prediction.step_s
    peak = None if prediction is None else prediction.peaks.get(name)
    used = [compute_utilization(one, peak, step_s) for one in planned]
    planned_memory = {} if fullest is None else dict(fullest.memory_bytes)
    if seen is not None and seen.planned_memory:
        planned_memory = seen.planned_memory  # of the splits in effect at the measured peak
    return ClassFacts(
        device_class=name,
        devices=len(workers),
        what=_describe_class(run, name),
        hosts=tuple(dict.fromkeys(worker.host for worker in workers)),
        memory_limit_bytes=None if fullest is None else fullest.memory_limit_bytes,
        planned_memory=planned_memory,
        planned_peak_bytes=sum(planned_memory.values()) or None,
        host_bytes=0 if fullest is None else fullest.host_bytes,
        peak_bytes=None if seen is None else seen.peak_bytes,
        measured_memory={} if seen is None else seen.measured_memory,
        reserved_bytes=None if seen is None else seen.reserved_bytes,
        retries=0 if seen is None else seen.retries,
        planned_busy_share=compute_planned_busy(run.plan).get(name),
        busy_share=None if seen is None else seen.busy_share,
        planned_mfu=_mean([mfu for mfu, _ in used]),
        mfu=None if seen is None else seen.mfu,
        planned_hfu=_mean([hfu for _, hfu in used]),
        hfu=None if seen is None else seen.hfu,
        peak_source="" if peak is None else peak.source,
        tokens_per_s=None if seen is None else seen.tokens_per_s,
        shares=None if seen is None else seen.shares,
        overruns=0 if seen is None else seen.overruns,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if empty or if any value is unknown."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _describe_class(run: Run, name: str) -> str:
    if run.profile is None:
        return ""
    classes = {one.name: one for one in run.profile.cluster.classes}
    return classes[name].describe() if name in classes else ""
