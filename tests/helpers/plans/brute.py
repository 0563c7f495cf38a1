"""The best step time by trying everything, and small random profiles to try it on.

Written from the meaning of the cost model, one device and one option at a time in plain Python,
with none of the planner's tables, thresholds or knapsacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations_with_replacement, product
from math import inf

from hypothesis import strategies as st

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.peak_memory import Activations, compute_free_bytes
from gpumix.cost.step_time import can_predict_mode, compute_exposed_seconds, compute_pass_seconds
from gpumix.planner.common.device_pool import Fleet
from gpumix.planner.common.sharding_setting import ShardingSetting, iterate_settings
from gpumix.planner.common.strategy import PlanRequest, get_prediction, list_devices_by_rank
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.cluster.network import ClassPairLink, Link
from gpumix.schema.cluster.network import Network as StatedNetwork
from gpumix.schema.curve import Curve
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.plan import Collectives, Plan
from gpumix.schema.plan.stage import DTYPE_BYTES
from gpumix.schema.profile.profile import ROOT, Profile, UnitTimes
from helpers.plans.profiles import Card, Network, block, curve, profile, root

# None, or so many that two unequal intervals do not come out equal by rounding.
ELEMENTS = st.one_of(st.just(0), st.integers(300, 3000))

# Of one device: samples, forward and backward seconds, capacity, seconds to update everything.
Option = tuple[int, float, float, float, float]

# Cuts samples into micro-batches of a size. What is summed of a curve is kept in what it gives.
Cut = Callable[[int, int], MicroBatches]


def cuts() -> Cut:
    """One that cuts everything once, for as long as curves are the same."""
    return cache(lambda samples, micro_batch: MicroBatches.of([samples], [micro_batch]))


def plan_of(profile: Profile, batch: int, space: Space = EVERYTHING) -> Plan | None:
    """The optimal plan; None if nothing fits."""
    try:
        return plan_one_stage(profile, PlanRequest(global_batch=batch, space=space))
    except NoFeasiblePlanError:
        return None


def step_of(profile: Profile, batch: int, space: Space = EVERYTHING) -> float | None:
    """Seconds of the optimal plan's step; None if nothing fits."""
    plan = plan_of(profile, batch, space)
    return None if plan is None else get_prediction(plan).step_s


def best_step(
    profile: Profile, batch: int, space: Space = EVERYTHING, *, cut: Cut | None = None
) -> float | None:
    """Seconds of the fastest step of all plans; None if no plan fits."""
    cut = cut or cuts()
    devices = list_devices_by_rank(profile, PlanRequest(global_batch=batch))
    steps = []
    for setting in iterate_settings(Fleet.of(profile, devices), space):
        best = best_of(_with_all_modes(setting, space), batch, cut)
        if best < inf:
            steps.append(compute_exposed_seconds(profile, setting.links) + best)
    return min(steps, default=None)


def _with_all_modes(setting: ShardingSetting, space: Space) -> ShardingSetting:
    """The setting with all that was measured, also what the planner finds not worth a look."""
    every = tuple(space.modes(setting.zero_stage))
    modes = {
        n: tuple(m for m in every if can_predict_mode(setting.profile, n, m))
        for n in setting.classes
    }
    return replace(setting, modes=modes)


def best_of(setting: ShardingSetting, batch: int, cut: Cut) -> float:
    """The least sum of the three maxima over all ways to give every device one option."""
    best = inf
    hosts = sorted({d.host for d in setting.devices}) if setting.sharding == "host" else [""]
    of_host = {host: [d for d in setting.devices if host in ("", d.host)] for host in hosts}
    groups = []
    for host, there in of_host.items():
        for name, n in sorted(Counter(d.device_class for d in there).items()):
            every = _options(setting, name, batch, len(there), cut)
            groups.append((host, list(combinations_with_replacement(every, n))))
    for combination in product(*(ways for _, ways in groups)):
        chosen = [option for part in combination for option in part]
        if sum(o[0] for o in chosen) != batch:
            continue
        pools: dict[str, list[Option]] = {}
        for (host, _), part in zip(groups, combination):
            pools.setdefault(host, []).extend(part)
        if any(sum(o[3] for o in pool) < 1 - 1e-12 for pool in pools.values()):
            continue
        if setting.zero_stage >= 1:
            passes = max(o[1] for o in chosen) + max(o[2] for o in chosen)
        else:
            passes = max(o[1] + o[2] for o in chosen)
        if passes < best:
            best = min(best, passes + max(map(partial(_update, setting), pools.values())))
    return best


def _options(setting: ShardingSetting, name: str, batch: int, ranks: int, cut: Cut) -> list[Option]:
    """Every way in which a device of the class can run 0 to `batch` samples and still fit, but for
    those that another one with as many samples beats."""
    model, free = setting.profile.model_of(name), compute_free_bytes(setting.profile, name)
    host_bytes = find_room_on_host(setting.profile, name)
    sizes = [(0, 0)]
    sizes += [
        (b, m)
        for b in range(1, batch + 1)
        for m in range(1, setting.largest_micro_batch(name, b) + 1)
    ]
    options: list[Option] = []
    for (b, m), mode in product(sizes, setting.modes[name]):
        micro = cut(b, m)
        held = Activations(model, micro, mode)
        demands = setting.memory.demands(held, state_on=setting.state_on(name))
        room = float(demands.capacity(free, host_bytes)[0])
        if room < 0:
            continue
        if setting.zero_stage == 0:
            room = 1.0
        elif setting.cap == 1.0 and room < 1 / ranks:
            continue
        forward, backward = compute_pass_seconds(setting.profile, name, setting.links, micro, mode)
        update = setting.update_s(name)
        room = min(room, setting.cap / ranks) if setting.zero_stage else room
        options.append((b, float(forward[0]), float(backward[0]), room, update))
    return [
        o
        for i, o in enumerate(options)
        if not any(_beats(other, o, earlier=j < i) for j, other in enumerate(options) if i != j)
    ]


def _beats(one: Option, other: Option, *, earlier: bool) -> bool:
    """Whether `one` is nowhere worse than `other`; of two that are equal the earlier one stays."""
    if one[0] != other[0] or (one == other and not earlier):
        return False
    return one[1] <= other[1] and one[2] <= other[2] and one[3] >= other[3]


def _update(setting: ShardingSetting, chosen: list[Option]) -> float:
    """The least time in which all of the state can be updated, by bisection."""
    if setting.zero_stage == 0:
        return max(o[4] for o in chosen)
    low, high = 0.0, max(o[4] for o in chosen)
    for _ in range(60):
        middle = (low + high) / 2
        done = sum(min(o[3], middle / o[4] if o[4] else 1.0) for o in chosen)
        low, high = (low, middle) if done >= 1 - 1e-12 else (middle, high)
    return high


@st.composite
def curves(draw: st.DrawFn, scale: float) -> Curve:
    """One to four points between 1 and 6 samples; noisy, sometimes flat, sometimes free."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True).map(sorted))
    steps = draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    values = [scale * sum(steps[: i + 1]) for i in range(len(sizes))]
    return curve(*values, sizes=[float(s) for s in sizes])


@st.composite
def small_profiles(draw: st.DrawFn) -> Profile:
    """One to three classes, two to four devices, one or two kinds of unit, memory often tight."""
    kinds = draw(st.lists(_kinds(), min_size=1, max_size=2, unique_by=lambda k: k.name))
    names = [k.name for k in kinds]
    calls = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    counts = draw(st.sampled_from([(2,), (3,), (1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 1, 1)]))
    state = 16 * sum(k.trainable for k in kinds) * len(calls)
    cards = [draw(_cards(f"c{i}", count, names, state)) for i, count in enumerate(counts)]
    head = draw(curves(200))
    in_chunks = draw(st.one_of(st.none(), curves(100), st.just(_halved(head))))
    if in_chunks is not None:
        cards = [
            replace(card, chunked_cross_entropy=draw(_heads_in_chunks(card))) for card in cards
        ]
    accelerator = draw(st.sampled_from(["cpu", "cuda"]))
    per_host = draw(st.sampled_from([0, 0, 1, 2]))
    before, after = draw(ELEMENTS), draw(ELEMENTS)
    return profile(
        [replace(card, accelerator=accelerator, per_host=per_host) for card in cards],
        calls=calls,
        kinds=kinds,
        root_unit=root(
            draw(ELEMENTS) + before + after,
            draw(st.integers(0, 500)),
            kept=draw(curves(50)),
            head=head,
            chunked_cross_entropy=in_chunks,
            before=before,
            after=after,
        ),
        network=draw(_networks()),
        dtype=draw(_dtypes(len(cards))),
        overhead=draw(st.sampled_from([0.0, 0.01])),
    )


def _heads_in_chunks(card: Card) -> st.SearchStrategy[Curve | None]:
    """Not measured, at any price, or half that of the whole head."""
    return st.one_of(st.none(), curves(3e-3), st.just(_halved(card.times[ROOT].backward)))


def _halved(whole: Curve) -> Curve:
    return whole.model_copy(update={"values": tuple(v / 2 for v in whole.values)})


def _dtypes(cards: int) -> st.SearchStrategy[list[str]]:
    """The same on all cards, or not."""
    alike = st.sampled_from(["fp32", "bf16"]).map(lambda dtype: [dtype] * cards)
    return alike | st.lists(st.sampled_from(list(DTYPE_BYTES)), min_size=cards, max_size=cards)


@st.composite
def linked_profiles(draw: st.DrawFn) -> Profile:
    """Small profiles whose links are stated, not measured."""
    profile = draw(small_profiles())
    return linked(profile, draw(networks(profile)))


def linked(profile: Profile, network: StatedNetwork) -> Profile:
    """The profile with stated links in place of measured collectives."""
    cluster = profile.cluster.model_copy(update={"network": network})
    return profile.model_copy(update={"cluster": cluster, "network": ()})


@st.composite
def networks(draw: st.DrawFn, profile: Profile) -> StatedNetwork:
    """Links inside hosts and between them, some classes linked in their own way."""
    names = st.sampled_from(sorted(c.name for c in profile.cluster.classes))
    others = st.builds(
        ClassPairLink,
        where=st.sampled_from(["inside", "between"]),
        classes=st.tuples(names, names),
        link=_links(),
    )
    return StatedNetwork(
        inside=draw(_links()),
        between=draw(_links()),
        exceptions=tuple(draw(st.lists(others, max_size=2))),
    )


def _links() -> st.SearchStrategy[Link]:
    return st.sampled_from([1e4, 1e5, 1e6, 1e7]).map(lambda rate: Link.stated(rate, 1e-3))


@st.composite
def _networks(draw: st.DrawFn) -> Network:
    """Any forms; the native one, where there is one, is at least as fast as the others."""
    gather = draw(st.sampled_from(["broadcast", "list"]))
    reduce = draw(st.sampled_from(["all_to_all", "list"]))
    times: dict[str, dict[str, Curve]] = {"gather": {}, "reduce": {}}
    for operation, form in (("gather", gather), ("reduce", reduce)):
        scale = draw(st.integers(0, 9)) * 1e-3
        times[operation][form] = curve(scale, 4 * scale, sizes=(1000.0, 9000.0))
        if draw(st.booleans()):
            times[operation]["native"] = curve(0.7 * scale, 2 * scale, sizes=(1000.0, 9000.0))
    scale = draw(st.integers(0, 9)) * 1e-3
    hosts = draw(st.booleans())
    return Network(
        **times,
        chosen=Collectives(gather=gather, reduce=reduce),
        inside=curve(0.3 * scale, scale, sizes=(1000.0, 9000.0)) if hosts else None,
        across=curve(0.5 * scale, 2 * scale, sizes=(1000.0, 9000.0)) if hosts else None,
        contention=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
    )


@st.composite
def _kinds(draw: st.DrawFn):
    return block(
        draw(st.sampled_from(["a", "b"])),
        trainable=draw(ELEMENTS),
        kept=draw(curves(100)),
        gradient=draw(curves(100)),
        forward=draw(curves(300)),
        backward=draw(curves(900)),
        frozen=draw(st.sampled_from([0, 0, 1000])),
        saved=draw(st.one_of(st.none(), curves(300))),
        saved_forward=draw(curves(200)),
        saved_backward=draw(curves(600)),
    )


@st.composite
def _cards(draw: st.DrawFn, name: str, count: int, kinds: list[str], state: int) -> Card:
    times = {
        kind: UnitTimes(
            forward=draw(curves(1e-3)),
            backward=draw(curves(3e-3)),
            gradient=draw(st.one_of(st.none(), curves(2e-3))),
        )
        for kind in [*kinds, ROOT]
    }
    return Card(
        name,
        count,
        memory=1 + int(draw(st.floats(0.2, 3)) * (state + 20_000)),
        times=times,
        optimizer_s_per_element=draw(st.sampled_from([0.0, 1e-6, 7e-6])),
        framework=draw(st.sampled_from([0, 1000])),
        largest=draw(st.sampled_from([None, 1, 3])),
        host_copy=draw(st.one_of(st.none(), st.just(curve(1e-4, 1e-3, sizes=(100.0, 2000.0))))),
        host_bytes=draw(st.sampled_from([None, 500, 20_000])),
        host_optimizer_s_per_element=draw(st.sampled_from([None, None, 2e-6, 3e-5])),
    )
