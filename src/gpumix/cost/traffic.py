"""Collectives of a step and their bytes, counted from a plan.

The counts use the operation names by which `engine.comm` counts real collectives. They hold for any
step except the first, which also gathers frozen parameters below ZeRO stage 3. The flags of which
parameters have a gradient, one byte each, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from gpumix.cost.memory_layout.curves import interpolate_bytes
from gpumix.cost.mixed_degrees import RankModelProfile, Sized
from gpumix.cost.network.buckets import AFTER, BEFORE, GRADIENT_BYTES, Buckets
from gpumix.cost.peak_memory import compute_owned_state
from gpumix.cost.pipeline.staged_step import StagedStep
from gpumix.cost.pipeline_schedule import Action
from gpumix.cost.predict import (
    check_plan_matches_profile,
    compute_plan_collectives,
    group_ranks_by_host,
)
from gpumix.cost.tensor_parallel_groups import list_group_collectives, reduce_to_leaders
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import DTYPE_BYTES, Worker, pair_replicas
from gpumix.schema.profile.profile import ROOT, Profile

EXCHANGE_BYTES = 10 * 8  # a row of `engine.comm.step_exchange.StepTable`
OVERFLOW_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Collectives of a step on a rank: counts and buffer bytes by operation."""

    counts: Counter[str]
    bytes: Counter[str]


# Copies between a device and its host in place of collectives.
_COPIES = {"gather": "fetch", "reduce": "put"}


def count_traffic(profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
    """Return the traffic of each rank. With one stage all ranks have equal counts.

    Raises:
        InputError: the profile is of another model, sequence length or precision.
    """
    check_plan_matches_profile(profile, plan)
    if len(plan.stages) == 1:
        return _with_members(profile, plan, list(_count_single_stage(profile, plan)))
    in_stages = _StagedTraffic(profile, plan)
    found = _with_members(profile, plan, list(in_stages.of_leaders()))
    for giver, taker, size in in_stages.messages():
        _add(found[giver], "send", size)
        _add(found[taker], "receive", size)
    return found


def _count_single_stage(profile: Profile, whole: Plan) -> Iterator[Traffic]:
    """Yield the traffic of each leader of a plan with one stage."""
    of_leaders, plan = reduce_to_leaders(profile, whole)
    buckets = compute_plan_collectives(of_leaders, plan).buckets
    over_hosts = _count_host_sums(plan, buckets)
    known: dict[str, Traffic] = {}
    for worker, (of_rank, bytes_of_rank) in zip(plan.workers, over_hosts):
        if worker.device_class not in known:
            found = known[worker.device_class] = Traffic(Counter(), Counter())
            for operation, size in _list_step_end_exchanges(plan):
                _add(found, operation, size)
            for part in _split_buckets(profile, whole, 0, of_leaders, buckets, worker):
                for operation, size in _list_sharding_collectives(plan, part):
                    _add(found, operation, size)
        alike = known[worker.device_class]
        yield Traffic(alike.counts + Counter(of_rank), alike.bytes + Counter(bytes_of_rank))


def _split_buckets(
    profile: Profile, plan: Plan, number: int, of_leaders: Profile, buckets: Buckets, worker: Worker
) -> list[Buckets]:
    """Return the buckets of a stage. Where its tensor-parallel groups differ in size, return those
    of each part of a rank and those of undivided parameters: with the complete gradient on each
    rank, or with only a part to be summed."""
    model = of_leaders.model_of(worker.device_class)
    if not isinstance(model, RankModelProfile):
        return [buckets]
    stage = plan.stages[number]
    largest = next(leader for leader in stage.leaders if stage.get_tp_size(leader) == stage.tensor)
    *of_calls, root = list_group_collectives(profile, plan, number, largest)
    summed = dict(zip(of_leaders.model.kind_of_call, (told.summed for told in of_calls)))
    summed[ROOT] = root.summed
    parts = next(one.parts for one in stage.workers if one.device == worker.device)
    rest = model.undivided

    def with_sizes(of: Callable[[str, int, int], int]) -> Buckets:
        """Return buckets with sizes `of` a kind's name, a rank's elements and the undivided
        part."""

        def sized(name: str, own: Sized, undivided: Sized) -> Sized:
            trainable = of(name, own.trainable, undivided.trainable)
            frozen = of("", own.frozen_bytes, undivided.frozen_bytes)
            packed = of("", own.packed_bytes, undivided.packed_bytes)
            return own.model_copy(
                update={"trainable": trainable, "frozen_bytes": frozen, "packed_bytes": packed}
            )

        root = sized(ROOT, model.root, rest.root)
        ends = {
            "before": sized("", model.root.before, rest.root.before),
            "after": sized("", model.root.after, rest.root.after),
        }
        kinds = tuple(sized(kind.name, kind, rest.kind(kind.name)) for kind in model.kinds)
        root = root.model_copy(update=ends)
        return buckets.rebuild_for_model(model.model_copy(update={"kinds": kinds, "root": root}))

    of_part = with_sizes(lambda name, own, left: (own - left) // parts)
    whole = with_sizes(lambda name, own, left: left - summed.get(name, 0))
    in_sum = with_sizes(lambda name, own, left: summed.get(name, 0))
    return [*[of_part] * parts, whole, in_sum]


def _with_members(
    profile: Profile, plan: Plan, of_leaders: Sequence[Traffic]
) -> tuple[Traffic, ...]:
    """Return the traffic of all ranks: a leader's, with the group's own collectives, for each
    rank."""
    if not plan.uses_tensor_parallel:
        return tuple(of_leaders)
    leaders = {w.device: t for w, t in zip(plan.of_leaders.workers, of_leaders)}
    found: dict[str, Traffic] = {}
    for number, stage in enumerate(plan.stages):
        for tp_group in stage.tp_groups:
            one = leaders[tp_group[0].device]
            for operation, times, size in _list_group_collectives(
                profile, plan, number, tp_group[0]
            ):
                one.counts[operation] += times
                one.bytes[operation] += size
            found |= {w.device: Traffic(one.counts.copy(), one.bytes.copy()) for w in tp_group}
    return tuple(found[worker.device] for worker in plan.workers)


def _list_group_collectives(
    profile: Profile, plan: Plan, number: int, worker: Worker
) -> Iterator[tuple[str, int, int]]:
    """Yield operation, count and bytes of a tensor-parallel group's collectives in a step."""
    if plan.stages[number].get_tp_size(worker) == 1:
        return
    *of_units, root = list_group_collectives(profile, plan, number, worker)
    passes = [*root.forward, *root.backward]
    for told in of_units:
        passes += told.forward
        passes += told.backward if worker.mode.recompute else told.gradient
    stage, times = plan.stages[number], plan.waves if plan.in_waves else 1
    summed = list({name: t.summed for name, t in zip(stage.units, of_units)}.values())
    for first in range(0, len(summed), stage.joined) if not stage.has_mixed_degrees else ():
        if size := sum(summed[first : first + stage.joined]):
            yield "all_reduce", times, times * size * GRADIENT_BYTES
    for one, size in product(passes, worker.micro_batches):
        yield one.operation, one.times, int(float(interpolate_bytes(one.bytes, size)))


def _list_step_end_exchanges(plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield operation and bytes of the exchanges between all ranks at a step's end."""
    yield "exchange", EXCHANGE_BYTES
    if any(worker.compute_dtype == "fp16" for worker in plan.workers):
        yield "all_reduce", OVERFLOW_BYTES


def _list_sharding_collectives(plan: Plan, buckets: Buckets) -> Iterator[tuple[str, int]]:
    """Yield operation and bytes of collectives with equal bytes on every rank; with parameters on
    hosts, of the copies in their place."""
    on_host = plan.parameters_on == "host"
    for operation, size in _list_gathers_and_reductions(plan, buckets):
        yield _COPIES[operation] if on_host else operation, size


def _list_gathers_and_reductions(plan: Plan, buckets: Buckets) -> Iterator[tuple[str, int]]:
    sizes, width = buckets.sizes, DTYPE_BYTES[plan.communication_dtype]
    every = [sizes[name] for name in buckets.names if sizes[name].trainable]
    for size in every * plan.waves:
        yield "all_reduce" if plan.zero_stage == 0 else "reduce", size.gradient_bytes
    if plan.zero_stage in (1, 2):
        for size in every:
            yield "gather", size.trainable * width
    if plan.zero_stage == 3:
        runs = [sizes[buckets.kind(run)] for run in range(len(buckets.runs))]
        ends = [sizes[name] for name in (BEFORE, AFTER)]
        # The last run's stays between the passes, the root's throughout.
        of_wave = (*ends, *runs, *runs[:-1])
        for size in (sizes[ROOT], *of_wave * plan.waves):
            for part in (size.trainable * width, *size.frozen_buffers):
                if part:
                    yield "gather", part


def _count_host_sums(plan: Plan, buckets: Buckets) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return the counts and bytes of each rank's gradient sums over hosts."""
    found: list[tuple[dict[str, int], dict[str, int]]] = [({}, {})] * len(plan.workers)
    hosts = group_ranks_by_host(plan.workers)
    if plan.sharding == "all" or plan.zero_stage == 0 or len(hosts) == 1:
        return found
    shares = {
        host: tuple(plan.workers[rank].state_share for rank in ranks)
        for host, ranks in hosts.items()
    }
    alike, counts = len(set(shares.values())) == 1, buckets.counts()
    trained = sum(n for name, n in counts.items() if buckets.sizes[name].trainable)
    for host, ranks in hosts.items():
        for rank, owned in zip(ranks, compute_owned_state(buckets, shares[host])):
            elements = sum(counts[name] * n for name, n in owned.elements)
            # All elements with the peers, or the common elements with each other host.
            operation, times = ("all_reduce", 1) if alike else ("exchange_parts", len(hosts) - 1)
            size = times * elements * GRADIENT_BYTES
            waves = plan.waves
            found[rank] = {operation: waves * trained}, {operation: waves * size}
    return found


class _StagedTraffic:
    """Traffic of a plan with several stages: collectives of each, and messages in between."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._step = StagedStep(profile, plan)
        self._plan, self._whole = self._step.plan, plan

    def of_leaders(self) -> Iterator[Traffic]:
        """Yield the collectives of each leader."""
        for rank in range(len(self._plan.workers)):
            of_rank = Traffic(Counter(), Counter())
            for operation, size in self._collectives(rank):
                _add(of_rank, operation, size)
            yield of_rank

    def messages(self) -> Iterator[tuple[int, int, int]]:
        """Yield sender, receiver and bytes of each message."""
        plan, step = self._whole, self._step
        cuts = [stage.micro_batches(plan.waves) for stage in plan.stages]
        stage_of = [n for n, stage in enumerate(plan.stages) for _ in stage.units]
        for to, stage in enumerate(plan.stages):
            for taken in stage.takes:
                made = stage_of[taken.call]
                for here, there in zip(cuts[made], cuts[to]):
                    size = step.taken_bytes(taken, len(here.rows))
                    givers = plan.ranks_of(made)[here.seats.start : here.seats.stop]
                    takers = plan.ranks_of(to)[there.seats.start : there.seats.stop]
                    pairs = [*pair_replicas(givers, takers)]
                    if taken.differentiable:
                        pairs += pair_replicas(takers, givers)
                    yield from ((one, other, size) for one, other in pairs if one != other)

    def _collectives(self, rank: int) -> Iterator[tuple[str, int]]:
        plan, step = self._plan, self._step
        width = DTYPE_BYTES[plan.communication_dtype]
        yield from _list_step_end_exchanges(plan)
        for shared in step.cut.shared:
            if set(shared.stages) & set(plan.stages_of(rank)):
                yield (
                    "all_reduce" if plan.zero_stage == 0 else "reduce",
                    (shared.trainable * GRADIENT_BYTES),
                )
                if plan.zero_stage:
                    yield "gather", shared.trainable * width
        for number in plan.stages_of(rank):
            yield from self._of_stage(rank, number)

    def _of_stage(self, rank: int, number: int) -> Iterator[tuple[str, int]]:
        cost = self._step.stages[number]
        worker = cost.workers[self._step.place_of[number, rank]]
        every = _split_buckets(
            self._step.profile, self._whole, number, cost.profile, cost.links.buckets, worker
        )
        for buckets in every:
            yield from self._of_buckets(rank, number, buckets)

    def _of_buckets(self, rank: int, number: int, buckets: Buckets) -> Iterator[tuple[str, int]]:
        plan = self._plan
        width, sizes = DTYPE_BYTES[plan.communication_dtype], buckets.sizes
        of_units = [sizes[name] for name in buckets.kinds]
        root = sizes[ROOT]
        order = self._step.order(rank)
        waves = sum(a.kind == "backward" and a.stage == number for a in order)
        times = waves if plan.in_waves else 1
        for size in (*of_units * times, root):
            if size.trainable:
                yield "all_reduce" if plan.zero_stage == 0 else "reduce", size.gradient_bytes
        if plan.zero_stage in (1, 2):
            for size in (*of_units, root):
                if size.trainable:
                    yield "gather", size.trainable * width
        if plan.zero_stage == 3:
            runs = [sizes[buckets.kind(run)] for run in range(len(buckets.runs))]
            gathered = [root]
            puts_off = plan.puts_off(number, plan.worker_of(rank, number))
            for before, action in zip((None, *order), order):
                if action.stage == number and (puts_off or action.kind != "weights"):
                    # The last run's bucket stays if the backward follows at once.
                    stays = before == Action("forward", number, action.batch)
                    gathered += runs[: len(runs) - stays]
            for size in gathered:
                for part in (size.trainable * width, *size.frozen_buffers):
                    if part:
                        yield "gather", part


def _add(traffic: Traffic, operation: str, size: int) -> None:
    traffic.counts[operation] += 1
    traffic.bytes[operation] += size
