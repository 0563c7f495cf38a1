"""Detection of devices computing wrong, by all ranks' gradients of one batch. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Worker

Prints = Mapping[str, Sequence[float]]
"""Fingerprint of a rank by bucket: the norm of its gradient, then sums of its parts."""

# Relative distance of gradients of sound devices: they add up in another order, in other kernels.
# Errors that matter are much larger.
TOLERANCE = {"fp32": 1e-3, "tf32": 3e-2, "fp16": 3e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class Verdict:
    """Deviating ranks, the largest deviation, and the first bucket with a deviation: backward runs
    from the last unit to the first. `sure`: a majority agrees."""

    ranks: tuple[int, ...]
    deviation: float
    where: str
    sure: bool


def group_comparable_ranks(plan: Plan) -> list[list[int]]:
    """Group ranks computing equal units, and equal parts in tensor-parallel groups; only ranks with
    samples, in groups of two or more."""
    places: dict[int, tuple[int, ...]] = {}
    for number, stage in enumerate(plan.stages):
        ranks = plan.ranks_of(number)
        for seats in stage.seats:
            for place, seat in enumerate(seats):
                if stage.workers[seat].samples:
                    rank = ranks[seat]
                    places[rank] = (*places.get(rank, ()), number, len(seats), place)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(places):
        found.setdefault(places[rank], []).append(rank)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def explain_no_replay(plan: Plan) -> str:
    """Explain why no devices of a plan can be compared; empty if some can."""
    if group_comparable_ranks(plan):
        return ""
    if sum(worker.samples > 0 for worker in plan.workers) < 2:
        return "one device alone computes"
    part = "the same parts of units" if plan.uses_tensor_parallel else "the same stage"
    return f"no two devices compute {part}"


def get_tolerance(workers: Sequence[Worker]) -> float:
    """Return the tolerance between devices computing like the given workers."""
    kinds = [
        "tf32" if w.compute_dtype == "fp32" and w.efficiency.tf32 else w.compute_dtype
        for w in workers
    ]
    return max(TOLERANCE[kind] for kind in kinds)


def find_deviating_ranks(prints: Mapping[int, Prints], tolerated: float) -> Verdict | None:
    """Find deviating ranks; None if all agree, with fewer than two ranks, or without a finite
    gradient.

    Args:
        prints: by rank; the buckets in the order in which their gradients were done.
    """
    ranks = list(prints)
    if len(ranks) < 2 or not any(math.isfinite(_norm(prints[rank])) for rank in ranks):
        return None
    worst: dict[int, float] = {}
    first: dict[int, str] = {}
    for bucket in prints[ranks[0]]:
        for rank in ranks:
            mine = prints[rank][bucket]
            apart = median_low(
                [_compute_distance(mine, prints[o][bucket]) for o in ranks if o != rank]
            )
            if apart > tolerated:
                worst[rank] = max(worst.get(rank, 0.0), apart)
                first.setdefault(rank, bucket)
    if not worst:
        return None
    most = max(worst, key=lambda rank: worst[rank])
    return Verdict(tuple(sorted(worst)), worst[most], first[most], sure=2 * len(worst) < len(ranks))


def _norm(prints: Prints) -> float:
    return math.hypot(*(values[0] for values in prints.values()))


def _compute_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of two ranks' gradients of a bucket, relative to the norms."""
    difference = math.dist(one, other)
    if not math.isfinite(difference):
        return math.inf
    norm = (one[0] + other[0]) / 2
    return difference / norm if norm else 0.0
