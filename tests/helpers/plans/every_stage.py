"""All plans of several stages of a small space, made without the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, cycle, pairwise, permutations, product

from gpumix.cost.predict import predict
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan, Schedule
from gpumix.schema.plan.stage import Mode, Stage, Worker
from gpumix.schema.profile.profile import Profile

ROUNDS = {"interleaved": 2}  # stages of each group


def every_plan(found: Profile, batch: int, space: Space) -> Iterator[Plan]:
    """All plans of a space, with equal shares, without sequence parallelism."""
    for groups, schedule in product(every_row(found), space.pipeline_schedules):
        stages = len(groups) * ROUNDS.get(schedule, 1)
        if stages > len(found.model.calls):
            continue
        for degrees in product(*(degrees_of(found, group, space) for group in groups)):
            tp_groups = [len(group) // degree for group, degree in zip(groups, degrees)]
            for size in range(1, batch + 1):
                for deal in every_deal(tp_groups, -(-batch // size)):
                    yield from dealt(
                        found, groups, deal, size, batch, schedule, space, degrees=degrees
                    )


def degrees_of(found: Profile, group: Sequence[Device], space: Space) -> list[int]:
    """The degrees of its tensor-parallel groups, of one class and host, in the order of ranks."""
    measured = {tp_profile.degree for tp_profile in found.tp_profiles}

    def alike(degree: int) -> bool:
        places = [(device.host, device.device_class) for device in group]
        tp_groups = [places[n : n + degree] for n in range(0, len(places), degree)]
        return all(len(tp_group) == degree and len(set(tp_group)) == 1 for tp_group in tp_groups)

    return [n for n in space.tensor_parallel_size if n == 1 or (n in measured and alike(n))]


def every_row(found: Profile) -> list[list[tuple[Device, ...]]]:
    """All ways to stand in a row of groups; of those in which alike devices change places, one."""
    devices = found.cluster.in_rank_order()
    rows: dict[object, list[tuple[Device, ...]]] = {}
    for order in permutations(devices):
        for stages in range(2, len(devices) + 1):
            for ends in combinations(range(1, len(devices)), stages - 1):
                groups = [order[a:b] for a, b in pairwise([0, *ends, len(devices)])]
                if all(list(g) == sorted(g, key=lambda d: d.id) for g in groups):
                    rows.setdefault(_places(groups), groups)
    return list(rows.values())


def _places(groups: Sequence[Sequence[Device]]) -> object:
    """Who stands where, but for names: classes, and which devices have one host, island, rack."""
    numbers: dict[tuple[str, str], int] = {}

    def place(device: Device) -> tuple[object, ...]:
        named = (("host", device.host), ("island", device.island), ("rack", device.rack))
        return device.device_class, *(numbers.setdefault(one, len(numbers)) for one in named)

    return tuple(tuple(map(place, group)) for group in groups)


def every_deal(workers: Sequence[int], count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to give so many micro-batches to the workers of each group."""
    return product(
        *([w for w in product(range(count + 1), repeat=n) if sum(w) == count] for n in workers)
    )


def dealt(
    found: Profile,
    groups: Sequence[Sequence[Device]],
    deal: Sequence[Sequence[int]],
    size: int,
    batch: int,
    schedule: Schedule,
    space: Space,
    cuts: Sequence[tuple[int, ...]] = (),
    degrees: Sequence[int] = (),
) -> Iterator[Plan]:
    """All plans in which these groups have so many micro-batches of a size.

    Args:
        deal: of each group, micro-batches of each of its workers, or of each tensor-parallel group.
        cuts: calls that stages begin with; default: all there are.
        degrees: of each group, its tensor parallel degree; default: each device computes alone.
    """
    calls, stages = len(found.model.calls), len(groups) * ROUNDS.get(schedule, 1)
    keeps = [
        Mode(recompute=value)
        for value in space.gradient_checkpointing
        if found.model.kinds[0].saved or value
    ]
    modes = [mode for mode in keeps if schedule != "zero-bubble" or not mode.recompute]
    heads = space.cross_entropy if found.model.root.chunked_cross_entropy else ("whole",)
    ends_in = [mode.model_copy(update={"head": head}) for mode in modes for head in heads]
    fewest = min(map(max, deal))
    for inner in cuts or combinations(range(1, calls), stages - 1):
        for of_stages in product(*[modes] * (stages - 1), ends_in):
            made = tuple(
                _stage(found, group, counts, size, batch, mode, ends, degree)
                for (group, counts, degree), mode, ends in zip(
                    cycle(zip(groups, deal, degrees or [1] * len(groups))),
                    of_stages,
                    pairwise([0, *inner, calls]),
                )
            )
            for zero_stage in space.zero_stages:
                for waves in range(1, fewest + 1 if zero_stage > 1 else 2):
                    yield Plan(
                        strategy="every",
                        model=found.model.fingerprint,
                        sequence_length=128,
                        global_batch=batch,
                        stages=made,
                        schedule=schedule,
                        waves=waves,
                        zero_stage=zero_stage,
                        collectives={"gather": "list", "reduce": "list"},
                    )


def _stage(found, group, counts, size, batch, mode, ends, degree) -> Stage:
    samples = [n * size for n in counts]
    last = max(p for p, n in enumerate(counts) if n)
    samples[last] -= sum(samples) - batch
    needs = found.model.needs_of(*ends)
    workers = [
        Worker(
            device=d.id,
            device_class=d.device_class,
            host=d.host,
            samples=n,
            micro_batch=min(n, size),
            state_share=1 / len(counts),
            mode=mode,
        )
        for d, n in zip(group, (n for n in samples for _ in range(degree)))
    ]
    return Stage(
        units=found.model.calls[slice(*ends)],
        workers=tuple(workers),
        tensor=degree,
        takes=needs.outputs,
        root=needs.root,
    )


def steps(found: Profile, batch: int, space: Space) -> list[tuple[float, float]]:
    """Of each plan, seconds of its step, and what part of its memory the fullest device takes."""
    told = []
    for plan in every_plan(found, batch, space):
        expected = predict(found, plan)
        full = max(w.peak_bytes / w.memory_limit_bytes for w in expected.workers)
        told.append((expected.step_s, full))
    return told


def least_s(found: Profile, batch: int, space: Space) -> float:
    """Of the fastest plan that fits; infinite if none does."""
    return min((s for s, full in steps(found, batch, space) if full <= 1), default=float("inf"))
