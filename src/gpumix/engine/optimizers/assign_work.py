"""Pure assignment of indivisible jobs to unequal workers, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence


def assign_jobs(
    costs: Sequence[float],
    speeds: Sequence[float],
    *,
    busy: Sequence[float] | None = None,
    near: Sequence[Sequence[float]] | None = None,
) -> list[int]:
    """Assign a worker to each job, so that the last worker ends early. The costliest job is first,
    each at the worker that ends it first: at most twice the optimum (Gonzalez, Ibarra, Sahni 1977),
    for equal workers within a third of it (Graham 1969).

    Args:
        costs: of each job.
        speeds: cost per unit time of each worker; workers of speed 0 get nothing, unless all are.
        busy: previous load of each worker, as cost.
        near: for each job, its share at each worker; decides ties.
    """
    if not any(speeds):
        speeds = [1.0] * len(speeds)
    load = list(busy or [0.0] * len(speeds))
    chosen = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda j: (-costs[j], j)):
        mine = near[job] if near else [0.0] * len(speeds)
        able = [worker for worker, speed in enumerate(speeds) if speed > 0]
        best = min(able, key=lambda w: ((load[w] + costs[job]) / speeds[w], -mine[w], w))
        load[best] += costs[job]
        chosen[job] = best
    return chosen
