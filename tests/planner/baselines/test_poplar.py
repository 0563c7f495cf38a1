"""Poplar's policy against its rule written out: every time, every number of micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.planner.baselines.poplar import plan_poplar
from gpumix.planner.common.strategy import PlanRequest
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.profile.profile import ROOT, UnitTimes
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import small_profiles
from helpers.plans.policies import (
    by_largest_remainder,
    even_step,
    fits_evenly,
    parts_of,
    plan_by,
    seconds,
    ways,
)
from helpers.plans.profiles import GIB, Card, Network, block, curve, fleet, line, profile, steady

MANY = examples(8)
ONE_WAY = {"shardings": ("all",), "gradient_checkpointing": (True,), "checkpoints_on": ("device",)}


LAYERS = Space(zero_stages=3, gradient_checkpointing=True, state_on="device")


@pytest.mark.parametrize("space", [EVERYTHING, LAYERS], ids=["everything", "layers"])
@MANY
@given(profile=small_profiles(), batch=st.integers(1, 8))
def test_it_is_the_published_rule(space, profile, batch):
    steps = []
    for setting, mode in ways(profile, batch, space):
        rule = own_pace if setting.zero_stage <= 1 else common_pace
        parts = rule(setting, mode, batch)
        if parts is not None:
            steps.append(even_step(setting, mode, parts, batch))
    plan = plan_by(plan_poplar, profile, batch, space)
    assert (plan is None) == (not steps)
    if plan is not None:
        assert plan.prediction.step_s == pytest.approx(min(steps), rel=1e-9)


def listed(setting):
    return [(name, device.id) for name, devices in setting.classes.items() for device in devices]


def measured(setting, mode, batch):
    """Seconds of one micro-batch by its size, as far as memory bears it, by class."""
    table = {}
    for name in setting.classes:
        table[name] = {}
        for size in range(1, setting.largest_micro_batch(name, batch) + 1):
            if not fits_evenly(setting, name, mode, size, size):
                break
            table[name][size] = seconds(setting, name, mode, size, size)
    return table if all(table.values()) else None


def own_pace(setting, mode, batch):
    """Stages 0 and 1: (device, samples, micro-batch) of each device."""
    times = measured(setting, mode, batch)
    if times is None:
        return None
    best, speed, most = {}, {}, {}
    for name, of_class in times.items():
        least = min(t / m for m, t in of_class.items())
        best[name] = min(m for m, t in of_class.items() if t / m <= least * (1 + 1e-12))
        speed[name] = 1 / least if least else float("inf")
        bears = [fits_evenly(setting, name, mode, n, best[name]) for n in range(batch + 1)]
        most[name] = next((n for n, good in enumerate(bears) if not good), batch + 1) - 1
    names = [name for name, _ in listed(setting)]
    if sum(most[name] for name in names) < batch:
        return None
    endless = float("inf") in speed.values()
    weights = [float(speed[n] == float("inf")) if endless else speed[n] for n in names]
    samples = by_largest_remainder(batch, weights, [most[name] for name in names])
    return [(id_, n, best[name]) for (name, id_), n in zip(listed(setting), samples)]


def common_pace(setting, mode, batch):
    """Stages 2 and 3: the cheapest of all times and numbers of micro-batches."""
    times = measured(setting, mode, batch)
    if times is None:
        return None
    kinds = [setting.profile.model.kind_of_call, setting.profile.model.calls]
    roots = (ROOT, "(root) before", "(root) after")
    units = [*roots, *dict(zip(kinds[1], kinds[0])).values()]
    links = setting.links
    moved = sum(links.gather_s[k] + links.regather_s[k] + links.reduce_s[k] for k in units)
    found = []
    for number in range(1, batch + 1):
        for pace in sorted({t for of_class in times.values() for t in of_class.values()}):
            sizes = {n: largest(setting, mode, batch, n, times[n], number, pace) for n in times}
            listed_sizes = [sizes[name] for name, _ in listed(setting)]
            if number * sum(listed_sizes) >= batch:
                found.append((number * (pace + moved), number, pace, listed_sizes))
    if not found:
        return None
    _, number, _, sizes = min(found)
    rest = by_largest_remainder(batch - (number - 1) * sum(sizes), sizes, sizes)
    return [
        (id_, (number - 1) * size + last, size)
        for (_, id_), size, last in zip(listed(setting), sizes, rest)
    ]


def largest(setting, mode, batch, name, times, number, pace):
    """The largest micro-batch within the pace, of which memory bears so many and none is idle."""
    size = 0
    for m, t in times.items():
        if t > pace or (number - 1) * m >= batch:
            break
        if not fits_evenly(setting, name, mode, min(number * m, batch), m):
            break
        size = m
    return size


def test_at_low_stages_each_device_takes_its_own_best_micro_batch():
    """`one` is fastest at 2 samples at once, `many` at as many as there are."""
    one = UnitTimes(forward=curve(1.0, 1.2, 9.0, 12.0), backward=curve(2.0, 2.4, 18.0, 24.0))
    many = UnitTimes(forward=line(0.1, 2.0), backward=line(0.2, 4.0))
    idle = UnitTimes(forward=line(0), backward=line(0))
    cards = [
        Card("one", 1, GIB, {"block": one, ROOT: idle}),
        Card("many", 1, GIB, {"block": many, ROOT: idle}),
    ]
    request = PlanRequest(global_batch=20, space=Space(zero_stages=(1,), **ONE_WAY))
    plan = plan_poplar(profile(cards), request)
    # 2 samples in 3.6 s; 20 samples in 12 s: speeds 0.556 and 1.667, so 5 and 15.
    assert parts_of(plan) == [("many", 15, 15), ("one", 5, 2)]


def test_at_high_stages_all_run_as_many_micro_batches():
    unit = block(trainable=0, backward=line(1_000))
    cards = [Card("big", 1, 9_000, steady(1.0)), Card("small", 1, 4_000, steady(1.0))]
    plan = plan_poplar(profile(cards, kinds=[unit]), PlanRequest(global_batch=19))
    # No more than 3 at once on the small card. Five times 2 and 2, and 1 too many in the end.
    assert parts_of(plan) == [("big", 10, 2), ("small", 9, 2)]


def test_the_stage_is_chosen_by_itself():
    """Gathering costs, so the lowest stage wins where memory allows it, and the highest if not."""
    wire = Network(gather={"broadcast": curve(5.0)}, reduce={"all_to_all": curve(0.1)})
    stages = {}
    for memory in (10**6, 160_000):
        card = Card("c", 2, memory, steady(1.0))
        made = profile([card], network=wire, calls=("block",) * 16)
        stages[memory] = plan_poplar(made, PlanRequest(global_batch=4, space=EVERYTHING)).zero_stage
    assert stages[10**6] < stages[160_000] == 3


def test_state_is_shared_evenly():
    plan = plan_poplar(fleet(8), PlanRequest(global_batch=64))
    assert {w.state_share for w in plan.workers} == {1 / 8}


def test_the_class_that_is_short_is_named():
    with raises(NoFeasiblePlanError, code="policy-does-not-fit", what="t4") as caught:
        plan_poplar(fleet(4, memory_factor=0.9), PlanRequest(global_batch=64))
    assert "optimal" in caught.value.fix
