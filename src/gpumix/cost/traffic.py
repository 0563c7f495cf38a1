"""Which collectives a step issues and how many bytes it gives them, counted from a plan.

A pure count, by the names by which `engine.comm` counts what it really does. It is of any step but
the first one, which also gathers what is frozen below ZeRO stage 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gpumix.cost.buckets import AFTER, BEFORE, GRADIENT_BYTES, Buckets
from gpumix.cost.memory import owned_by_rank
from gpumix.cost.predict import by_host, check_match, links_of_plan
from gpumix.spec.plan import DTYPE_BYTES, Plan
from gpumix.spec.profile import ROOT, Profile

EXCHANGE_BYTES = 3 * 8  # loss, count and notice of a rank
OVERFLOW_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step on one rank, and the bytes of the buffers that it gives them, by
    operation."""

    counts: Counter[str]
    bytes: Counter[str]


def traffic(profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """Of each rank. The counts are the same on all of them.

    Raises:
        InputError: the profile is of another model, sequence length or precision.
    """
    check_match(profile, plan)
    buckets = links_of_plan(profile, plan).buckets
    alike = Counter[str](), Counter[str]()
    for operation, size in _of_all(profile, plan, buckets):
        alike[0][operation] += 1
        alike[1][operation] += size
    return tuple(
        Traffic(alike[0] + Counter(counts), alike[1] + Counter(sizes))
        for counts, sizes in _over_hosts(plan, buckets)
    )


def _of_all(profile: Profile, plan: Plan, buckets: Buckets) -> Iterator[tuple[str, int]]:
    """The operation and the bytes of each collective that every rank gives as much."""
    sizes, width = buckets.sizes, DTYPE_BYTES[plan.communication_dtype]
    every = [sizes[name] for name in buckets.names if sizes[name].trainable]
    yield "exchange", EXCHANGE_BYTES
    if any(worker.compute_dtype == "fp16" for worker in plan.workers):
        yield "all_reduce", OVERFLOW_BYTES
    for size in every:
        yield "all_reduce" if plan.zero_stage == 0 else "reduce", size.gradient_bytes
    if plan.zero_stage in (1, 2):
        for size in every:
            yield "gather", size.trainable * width
    if plan.zero_stage == 3:
        runs = [sizes[buckets.kind(run)] for run in range(len(buckets.runs))]
        ends = [sizes[name] for name in (BEFORE, ROOT, AFTER)]
        for size in (*ends, *runs, *runs[:-1]):  # the last run's stays between the passes
            for part in (size.trainable * width, size.frozen_bytes):
                if part:
                    yield "gather", part


def _over_hosts(plan: Plan, buckets: Buckets) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Of each rank the counts and bytes of what sums gradients over hosts."""
    found: list[tuple[dict[str, int], dict[str, int]]] = [({}, {})] * len(plan.workers)
    hosts = by_host(plan.workers)
    if plan.sharding == "all" or plan.zero_stage == 0 or len(hosts) == 1:
        return found
    shares = {
        host: tuple(plan.workers[rank].state_share for rank in ranks)
        for host, ranks in hosts.items()
    }
    alike, counts = len(set(shares.values())) == 1, buckets.counts()
    trained = sum(n for name, n in counts.items() if buckets.sizes[name].trainable)
    for host, ranks in hosts.items():
        for rank, owned in zip(ranks, owned_by_rank(buckets, shares[host])):
            elements = sum(counts[name] * n for name, n in owned.elements)
            # All of them with their like, or to each other host what it has in common.
            operation, times = ("all_reduce", 1) if alike else ("exchange_parts", len(hosts) - 1)
            size = times * elements * GRADIENT_BYTES
            found[rank] = {operation: trained}, {operation: size}
    return found
