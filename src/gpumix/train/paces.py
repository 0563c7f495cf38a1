"""How long devices compute, and how samples are split by that; pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from gpumix.spec.plan import Plan
from gpumix.spec.stage import Stage, Worker


class Pace(NamedTuple):
    """How long a team computes: `fixed_s` in any case, and `sample_s` for each sample."""

    fixed_s: float
    sample_s: float

    def seconds(self, samples: int) -> float:
        return self.fixed_s + samples * self.sample_s

    def times(self, factor: float) -> Pace:
        return Pace(self.fixed_s * factor, self.sample_s * factor)

    def for_each(self, samples: int) -> Pace:
        """The same, counted in so many samples at once."""
        return Pace(self.fixed_s, self.sample_s * samples)


def planned_pace(plan: Plan, worker: Worker) -> Pace:
    """By the plan's prediction; without one all of the time is for samples, and alike for all."""
    told = plan.prediction.workers if plan.prediction is not None else ()
    expected = next((one for one in told if one.device == worker.device), None)
    if expected is None or not worker.samples or expected.busy_s <= expected.optimizer_s:
        return Pace(0.0, 1.0)
    sample_s = (expected.busy_s - expected.optimizer_s) / worker.samples
    return Pace(expected.optimizer_s, sample_s)


def with_data(
    paces: Sequence[Pace], hosts: Sequence[str], read_per_s: Mapping[str, float]
) -> list[Pace]:
    """Teams that are no faster, all of a host together, than it reads their samples; those of no
    host read none so far."""
    together: dict[str, float] = defaultdict(float)
    for pace, host in zip(paces, hosts):
        together[host] += 1.0 / pace.sample_s
    slower = {host: max(1.0, rate / read_per_s.get(host, inf)) for host, rate in together.items()}
    if all(times == 1.0 for times in slower.values()):
        return list(paces)
    return [Pace(pace.fixed_s, pace.sample_s * slower[host]) for pace, host in zip(paces, hosts)]


def slowest_s(paces: Sequence[Pace], samples: Sequence[int]) -> float:
    return max(pace.seconds(n) for pace, n in zip(paces, samples))


def bound_s(paces: Sequence[Pace], total: int) -> float:
    """No split takes less, if samples could be cut: all teams end at once."""
    rate = sum(1.0 / pace.sample_s for pace in paces)
    return (total + sum(p.fixed_s / p.sample_s for p in paces)) / rate


def split(
    total: int, paces: Sequence[Pace], most: Sequence[int], least: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """So many samples for each team that the slowest ends as early as can be; None if there is no
    memory for all.

    Args:
        most: the most that each may have.
        least: of those that may have some, so many at least; by default one, so that its pace
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
        _, team = heapq.heappop(ends)
        samples[team] += 1
        if samples[team] < most[team]:
            heapq.heappush(ends, (paces[team].seconds(samples[team] + 1), team))
    return tuple(samples)


def with_samples(plan: Plan, samples: Sequence[int]) -> Plan:
    """A plan of one stage with so many samples for each team; see `with_samples_in`."""
    return with_samples_in(plan, [samples])


def with_samples_in(plan: Plan, samples: Sequence[Sequence[int]]) -> Plan:
    """A plan with so many samples for each team of each stage, and no prediction. Micro-batches are
    those of the plan, where there are samples enough; who had none takes as large ones as any."""
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
        for count, team in zip(samples, stage.teams, strict=True)
        for worker in team
    )
    return stage.model_copy(update={"workers": workers})
