"""Divides jobs that cannot be cut over unequal workers: pure, so that all ranks decide the same."""

from __future__ import annotations

from collections.abc import Sequence


def assign(
    costs: Sequence[float],
    speeds: Sequence[float],
    *,
    busy: Sequence[float] | None = None,
    near: Sequence[Sequence[float]] | None = None,
) -> list[int]:
    """Which worker does each job, so that the last one ends early: the costliest job first, each to
    the worker that ends it first. That is at most twice the least possible (Gonzalez, Ibarra,
    Sahni 1977), and within a third of it for equal workers (Graham 1969).

    Args:
        costs: of each job.
        speeds: of each worker, cost done in unit time; one of speed 0 gets nothing, unless all are.
        busy: what each worker has to do already, as cost.
        near: for each job how much of it lies with each worker; decides between equals.
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
