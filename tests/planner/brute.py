"""The best step time by trying everything, and small random profiles to try it on.

Written from the meaning of the cost model, one device and one option at a time in plain Python,
with none of the planner's tables, thresholds or knapsacks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import inf

from hypothesis import strategies as st
from profiles import Card, Network, block, curve, profile, root

from gpumix.cost.curves import MicroBatches
from gpumix.cost.memory import free_bytes
from gpumix.cost.time import (
    backward_seconds,
    exposed_seconds,
    forward_seconds,
    optimizer_seconds,
)
from gpumix.planner.base import PlanRequest, Setting, predicted, ranked_devices
from gpumix.planner.optimal import optimal
from gpumix.spec.errors import NoFeasiblePlanError
from gpumix.spec.plan import Collectives, Plan
from gpumix.spec.profile import ROOT, Curve, Profile, UnitTimes

# None, or so many that two unequal intervals do not come out equal by rounding.
ELEMENTS = st.one_of(st.just(0), st.integers(300, 3000))

# Of one device: samples, forward and backward seconds, capacity, seconds to update everything.
Option = tuple[int, float, float, float, float]


def plan_of(profile: Profile, batch: int) -> Plan | None:
    """The optimal plan; None if nothing fits."""
    try:
        return optimal(profile, PlanRequest(global_batch=batch))
    except NoFeasiblePlanError:
        return None


def step_of(profile: Profile, batch: int) -> float | None:
    """Seconds of the optimal plan's step; None if nothing fits."""
    plan = plan_of(profile, batch)
    return None if plan is None else predicted(plan).step_s


def best_step(profile: Profile, batch: int) -> float | None:
    """Seconds of the fastest step of all plans; None if no plan fits."""
    devices = ranked_devices(profile, PlanRequest(global_batch=batch))
    steps = []
    for equal in (False, True):
        setting = Setting.of(profile, devices, equal_shares=equal)
        best = _best_of(setting, batch)
        if best < inf:
            steps.append(exposed_seconds(profile, setting.links) + best)
    return min(steps, default=None)


def _best_of(setting: Setting, batch: int) -> float:
    best = inf
    share = 1 / len(setting.devices) if setting.equal_shares else 0.0
    per_class = [
        list(combinations_with_replacement(_options(setting, name, batch, share), len(devices)))
        for name, devices in setting.classes.items()
    ]
    for combination in product(*per_class):
        chosen = [option for part in combination for option in part]
        if sum(o[0] for o in chosen) != batch or sum(o[3] for o in chosen) < 1 - 1e-12:
            continue
        passes = max(o[1] for o in chosen) + max(o[2] for o in chosen)
        if passes < best:
            best = min(best, passes + _update(chosen))
    return best


def _options(setting: Setting, name: str, batch: int, share: float) -> list[Option]:
    """Every way in which a device of the class can run 0 to `batch` samples and still fit."""
    times = setting.profile.of_class(name).units
    model, free = setting.profile.model, free_bytes(setting.profile, name)
    cuts = [(0, 0)]
    cuts += [
        (b, m)
        for b in range(1, batch + 1)
        for m in range(1, setting.largest_micro_batch(name, b) + 1)
    ]
    options = []
    for b, m in cuts:
        micro = MicroBatches.of([b], [m])
        room = float(setting.memory.demands(micro).capacity(free)[0])
        if room >= share:
            options.append(
                (
                    b,
                    float(forward_seconds(model, times, setting.links, micro)[0]),
                    float(backward_seconds(model, times, setting.links, micro)[0]),
                    share or room,
                    optimizer_seconds(setting.profile, name),
                )
            )
    return options


def _update(chosen: list[Option]) -> float:
    """The least time in which all of the state can be updated, by bisection."""
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
    accelerator = draw(st.sampled_from(["cpu", "cuda"]))
    return profile(
        [replace(card, accelerator=accelerator) for card in cards],
        calls=calls,
        kinds=kinds,
        root_unit=root(
            draw(ELEMENTS),
            draw(st.integers(0, 500)),
            kept=draw(curves(50)),
            head=draw(curves(200)),
        ),
        network=draw(_networks()),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        overhead=draw(st.sampled_from([0.0, 0.01])),
    )


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
    return Network(**times, chosen=Collectives(gather=gather, reduce=reduce))


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
    )


@st.composite
def _cards(draw: st.DrawFn, name: str, count: int, kinds: list[str], state: int) -> Card:
    times = {
        kind: UnitTimes(forward=draw(curves(1e-3)), backward=draw(curves(3e-3)))
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
    )
