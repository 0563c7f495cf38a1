"""Random plans for a profile, feasible or not: the cost model counts any plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from gpumix.cost.network.collective_times import (
    BufferCuts,
    CollectiveSeconds,
    ShardedLayout,
    compute_collective_seconds,
)
from gpumix.cost.network.link_times import FreeLinks, TimedCollectives
from gpumix.planner.common.sharding_setting import make_setting
from gpumix.planner.common.strategy import DevicePart, PlanRequest, build_plan, list_devices_by_rank
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.dtypes import choose_communication_dtype
from gpumix.schema.plan.plan import Collectives, Plan
from gpumix.schema.plan.stage import Mode, Stage, Worker
from gpumix.schema.profile.profile import Profile
from helpers.plans.brute import linked, networks, small_profiles


def links_of(
    profile: Profile, collectives: Collectives, shares: tuple[float, ...]
) -> CollectiveSeconds:
    """The collectives of ZeRO-3 over all ranks."""
    wire = TimedCollectives(profile.network) if profile.network else FreeLinks()
    dtype = choose_communication_dtype(c.compute_dtype for c in profile.classes)
    return compute_collective_seconds(
        profile, wire, ShardedLayout(3, "all", collectives, BufferCuts.at(shares), dtype)
    )


@st.composite
def plans_of(draw: st.DrawFn, profile: Profile) -> Plan:
    """Any samples, micro-batches and shares; some devices get nothing of either."""
    devices = list_devices_by_rank(profile, PlanRequest(global_batch=1))
    count = len(devices)
    samples = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any))
    weights = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any))
    parts = {
        device.id: DevicePart(
            samples=n,
            micro_batch=draw(st.integers(1, n)) if n else 0,
            share=weight / sum(weights),
        )
        for device, n, weight in zip(devices, samples, weights)
    }
    return build_plan(
        make_setting(profile, devices),
        strategy="random",
        global_batch=sum(samples),
        parts=parts,
    )


@st.composite
def profiles_of_all_kinds(draw: st.DrawFn) -> Profile:
    """Small profiles; in some a unit is called again, in some gradients wait beside those of one
    call, in some links are stated, not measured."""
    profile = draw(small_profiles())
    kinds = profile.model.kind_of_call
    calls = tuple(f"{kind}{draw(st.integers(0, 1))}" for kind in kinds)
    waiting = tuple(draw(st.sampled_from([0.0, 7.5, 300.0])) for _ in kinds)
    update = {
        "calls": draw(st.sampled_from([profile.model.calls, calls])),
        "waiting": draw(st.sampled_from([(), waiting])),
    }
    model, *others = (m.model_copy(update=update) for m in (profile.model, *profile.other_models))
    profile = profile.model_copy(update={"model": model, "other_models": tuple(others)})
    return draw(st.sampled_from([profile, linked(profile, draw(networks(profile)))]))


@st.composite
def plans_of_all_kinds(draw: st.DrawFn, profile: Profile) -> Plan:
    """Any ZeRO stage, sharding, collectives and shares, and on each device any samples and mode,
    as far as the profile knows what they take."""
    devices = profile.cluster.in_rank_order()
    per_host = Counter(d.host for d in devices)
    linked = bool(profile.network) or profile.cluster.network is not None
    stage = draw(st.sampled_from([0, 1, 2, 3]))
    knows_hosts = profile.cluster.network is not None or any(
        t.group == "across" for t in profile.network
    )
    by_host = stage > 0 and linked and knows_hosts and len(per_host) > 1
    sharding = draw(st.sampled_from(["all", "host"])) if by_host else "all"
    samples = draw(_some(0, 9, len(devices)))
    shares = dict(zip(devices, draw(_shares(devices, sharding))))
    pools = per_host if sharding == "host" else dict.fromkeys(per_host, len(devices))
    longest = max(shares[device] * pools[device.host] for device in devices)
    workers = tuple(
        Worker(
            device=device.id,
            device_class=device.device_class,
            host=device.host,
            samples=n,
            micro_batch=draw(st.integers(1, n)) if n else 0,
            state_share=shares[device],
            mode=mode,
            state_on=draw(_places(profile, device.device_class)),
            compute_dtype=profile.of_class(device.device_class).compute_dtype,
            kept_graphs=draw(_graphs(profile, device.device_class, mode)),
        )
        for device, n in zip(devices, samples)
        for mode in [draw(st.sampled_from(_modes(profile, device.device_class, stage)))]
    )
    return Plan(
        strategy="random",
        model=profile.model.fingerprint,
        sequence_length=profile.sequence_length,
        global_batch=sum(samples),
        communication_dtype=choose_communication_dtype(c.compute_dtype for c in profile.classes),
        stages=(
            Stage(
                units=profile.model.calls,
                workers=workers,
                joined=draw(st.integers(1, 3)),
                before=draw(st.sampled_from([(), profile.model.root.before.names])),
                after=draw(st.sampled_from([(), profile.model.root.after.names])),
            ),
        ),
        zero_stage=stage,
        sharding=sharding,
        collectives=draw(_collectives(profile, sharding, min(longest, float(len(devices))))),
    )


def _places(profile: Profile, name: str) -> st.SearchStrategy[str]:
    of = next(c for c in profile.classes if c.device_class == name)
    known = of.host_copy is not None and of.host_optimizer_s_per_element is not None
    return st.sampled_from(["device", "host"] if known else ["device"])


def _graphs(profile: Profile, name: str, mode: Mode) -> st.SearchStrategy[int]:
    """Some are kept where the mode recomputes, and they were measured. In layers: one after the
    other, the time that hides a reduction is approximate."""
    single = mode.order == "layered" and mode.recompute
    if not single or Mode(recompute=False) not in _modes(profile, name, 3):
        return st.just(0)
    return st.sampled_from([0, 0, 1, 2, 3, 5, 9])


def _some(least: int, most: int, count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, most), min_size=count, max_size=count).filter(any)


@st.composite
def _shares(draw: st.DrawFn, devices: Sequence[Device], sharding: str) -> list[float]:
    """Equal ones or any, which add up to 1 among those that divide the state."""
    pools: dict[str, list[Device]] = {}
    for device in devices:
        pools.setdefault(device.host if sharding == "host" else "", []).append(device)
    found: dict[Device, float] = {}
    equal = draw(st.booleans())
    for pool in pools.values():
        weights = [1] * len(pool) if equal else draw(_some(0, 5, len(pool)))
        found |= {device: w / sum(weights) for device, w in zip(pool, weights)}
    return [found[device] for device in devices]


def _modes(profile: Profile, name: str, stage: int) -> list[Mode]:
    """What was measured of a class."""
    of = next(c for c in profile.classes if c.device_class == name)
    kinds = [k for k in profile.model.kinds if k.name in profile.model.kind_of_call]
    graphs = all(k.saved is not None and of.units[k.name].gradient is not None for k in kinds)
    return [
        mode
        for mode in EVERYTHING.modes(stage)
        if (graphs or mode.recompute)
        and (of.host_copy is not None or mode.boundary == "device")
        and (of.chunked_cross_entropy is not None or mode.head == "whole")
    ]


@st.composite
def _collectives(draw: st.DrawFn, profile: Profile, sharding: str, longest: float) -> Collectives:
    """The forms that the profile knows; padded ones where the native form is known, with room for
    the longest interval."""
    group = "inside" if sharding == "host" else "all"
    native = {t.operation for t in profile.network if (t.form, t.group) == ("native", group)}
    named = profile.collectives
    if profile.cluster.network is not None and not profile.network:
        native, named = {"gather", "reduce"}, Collectives(gather="list", reduce="list")
    most = float(len(profile.cluster.devices))
    padding = draw(st.floats(max(1.0, longest), max(1.0, min(1.5 * longest, most))))
    padded = Collectives(gather="padded", reduce="padded", padding=padding)
    return draw(st.sampled_from([named, padded])) if len(native) == 2 else named
