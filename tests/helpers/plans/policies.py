"""What the tests of the policies share: peaks for made-up cards, and the cost of one device's part
asked one at a time, without the policies' tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.network.collective_times import CollectiveSeconds, make_free_collectives
from gpumix.cost.peak_memory import Activations, compute_free_bytes
from gpumix.cost.step_time import compute_pass_seconds
from gpumix.planner.common.score import iterate_even_settings
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.common.strategy import (
    DevicePart,
    PlanRequest,
    Strategy,
    build_plan,
    get_prediction,
    list_devices_by_rank,
)
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile


def peaked(profile: Profile, peaks: Sequence[float] = (3e12, 1e12, 2e12)) -> Profile:
    """The same profile with the classes' peak FLOP/s, by their names in order."""
    names = sorted(c.name for c in profile.cluster.classes)
    classes = tuple(
        c.model_copy(update={"peak_flops_per_s": peaks[names.index(c.name)]})
        for c in profile.cluster.classes
    )
    cluster = profile.cluster.model_copy(update={"classes": classes})
    return profile.model_copy(update={"cluster": cluster})


def plan_by(
    strategy: Strategy, profile: Profile, batch: int, space: Space = EVERYTHING
) -> Plan | None:
    """The plan of a strategy; None if it has none."""
    try:
        return strategy(profile, PlanRequest(global_batch=batch, space=space))
    except (InputError, NoFeasiblePlanError):
        return None


def parts_of(plan: Plan) -> list[tuple[str, int, int]]:
    """Class, samples and micro-batch of each worker."""
    return [(w.device_class, w.samples, w.micro_batch) for w in plan.workers]


def ways(profile: Profile, batch: int, space: Space) -> Iterator[tuple[ShardingSetting, Mode]]:
    devices = list_devices_by_rank(profile, PlanRequest(global_batch=batch))
    yield from iterate_even_settings(profile, devices, space)


def room(setting: ShardingSetting, name: str, mode: Mode, samples: int, micro_batch: int) -> float:
    """The largest share that a device has room for; -1 if none."""
    micro = MicroBatches.of([samples], [micro_batch])
    host = find_room_on_host(setting.profile, name)
    held = Activations(setting.profile.model_of(name), micro, mode)
    capacity = setting.memory.demands(held).capacity(
        compute_free_bytes(setting.profile, name), host
    )
    if setting.zero_stage == 0:
        return 1.0 if capacity[0] >= 0 else -1.0
    return float(capacity[0])


def fits_evenly(
    setting: ShardingSetting, name: str, mode: Mode, samples: int, micro_batch: int
) -> bool:
    return room(setting, name, mode, samples, micro_batch) >= 1 / len(setting.devices)


def seconds(
    setting: ShardingSetting,
    name: str,
    mode: Mode,
    samples: int,
    micro_batch: int,
    links: CollectiveSeconds | None = None,
) -> float:
    """Of both passes, by default without collectives."""
    links = links or make_free_collectives(setting.links.buckets)
    micro = MicroBatches.of([samples], [micro_batch])
    forward, backward = compute_pass_seconds(setting.profile, name, links, micro, mode)
    return float((forward + backward)[0])


def even_step(
    setting: ShardingSetting, mode: Mode, given: Sequence[tuple[str, int, int]], batch: int
) -> float:
    """Seconds of the step in which each device, as (id, samples, micro-batch), stores as much."""
    share = 1 / len(given)
    parts = {id_: DevicePart(n, min(m, n), share, mode) for id_, n, m in given}
    plan = build_plan(setting, strategy="test", global_batch=batch, parts=parts)
    return get_prediction(plan).step_s


def by_largest_remainder(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """`total` by weight, one entry a device, none more than `most`, which add up to enough."""
    full: set[int] = set()
    while True:
        left = total - sum(most[i] for i in full)
        rest = [i for i in range(len(most)) if i not in full]
        weight = sum(weights[i] for i in rest)
        if weight == 0 and left > 0:
            weights = [1.0 if i in rest else w for i, w in enumerate(weights)]
            continue
        shares = {i: left * weights[i] / weight if weight else 0.0 for i in rest}
        over = {i for i in rest if shares[i] > most[i]}
        if not over:
            break
        full |= over
    given = [int(shares.get(i, most[i])) for i in range(len(most))]
    for i in sorted(shares, key=lambda i: (given[i] - shares[i], i)):
        if sum(given) < total and given[i] < most[i]:
            given[i] += 1
    return given
