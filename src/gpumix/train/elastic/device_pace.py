"""Compute times of devices and the resulting splits of samples. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker


class DevicePace(NamedTuple):
    """Compute time of a tensor-parallel group: `fixed_s` per step plus `sample_s` per sample."""

    fixed_s: float
    sample_s: float

    def seconds(self, samples: int) -> float:
        return self.fixed_s + samples * self.sample_s

    def times(self, factor: float) -> DevicePace:
        return DevicePace(self.fixed_s * factor, self.sample_s * factor)

    def scale_samples(self, samples: int) -> DevicePace:
        """Return the pace counted in units of `samples` samples."""
        return DevicePace(self.fixed_s, self.sample_s * samples)


def predict_pace(plan: Plan, worker: Worker) -> DevicePace:
    """Return a worker's pace by the plan's prediction. Without a prediction all time is per sample,
    equal for all workers."""
    told = plan.prediction.workers if plan.prediction is not None else ()
    expected = next((one for one in told if one.device == worker.device), None)
    if expected is None or not worker.samples or expected.busy_s <= expected.optimizer_s:
        return DevicePace(0.0, 1.0)
    sample_s = (expected.busy_s - expected.optimizer_s) / worker.samples
    return DevicePace(expected.optimizer_s, sample_s)


def limit_by_reading(
    paces: Sequence[DevicePace], hosts: Sequence[str], read_per_s: Mapping[str, float]
) -> list[DevicePace]:
    """Slow down groups that, together on a host, compute faster than the host reads samples. Groups
    of no host (`""`) have read no samples so far."""
    together: dict[str, float] = defaultdict(float)
    for pace, host in zip(paces, hosts):
        together[host] += 1.0 / pace.sample_s
    slower = {host: max(1.0, rate / read_per_s.get(host, inf)) for host, rate in together.items()}
    if all(times == 1.0 for times in slower.values()):
        return list(paces)
    return [
        DevicePace(pace.fixed_s, pace.sample_s * slower[host]) for pace, host in zip(paces, hosts)
    ]


def slowest_s(paces: Sequence[DevicePace], samples: Sequence[int]) -> float:
    return max(pace.seconds(n) for pace, n in zip(paces, samples))


def compute_lower_bound_s(paces: Sequence[DevicePace], total: int) -> float:
    """Return the lower bound of any split: all groups end at once, with divisible samples."""
    rate = sum(1.0 / pace.sample_s for pace in paces)
    return (total + sum(p.fixed_s / p.sample_s for p in paces)) / rate


def split_samples(
    total: int, paces: Sequence[DevicePace], most: Sequence[int], least: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Split samples over groups to minimize the slowest group's time; None if `most` or `least`
    rule out `total`.

    Args:
        most: the most samples of each group.
        least: the fewest samples of each group, up to `most`; by default one, so that each pace
            stays known.
    """
    if least is None:
        least = [1] * len(most)
    samples = [min(few, limit) for few, limit in zip(least, most)]
    if sum(most) < total or sum(samples) > total:
        return None
    ends = [
        (pace.seconds(samples[n] + 1), n) for n, pace in enumerate(paces) if most[n] > samples[n]
    ]
    heapq.heapify(ends)
    for _ in range(total - sum(samples)):
        _, group = heapq.heappop(ends)
        samples[group] += 1
        if samples[group] < most[group]:
            heapq.heappush(ends, (paces[group].seconds(samples[group] + 1), group))
    return tuple(samples)


def with_samples_in(plan: Plan, samples: Sequence[Sequence[int]]) -> Plan:
    """Return the plan with new samples per stage and group, without a prediction. Micro-batches
    keep their size, up to the samples; workers without samples before get the stage's largest size.
    """
    stages = tuple(
        _with_samples(stage, counts) for stage, counts in zip(plan.stages, samples, strict=True)
    )
    return plan.model_copy(update={"stages": stages, "prediction": None, "reasons": None})


def _with_samples(stage: Stage, samples: Sequence[int]) -> Stage:
    largest = max(worker.micro_batch for worker in stage.workers)
    workers = tuple(
        worker.model_copy(
            update={"samples": count, "micro_batch": min(worker.micro_batch or largest, count)}
        )
        for count, tp_group in zip(samples, stage.tp_groups, strict=True)
        for worker in tp_group
    )
    return stage.model_copy(update={"workers": workers})
