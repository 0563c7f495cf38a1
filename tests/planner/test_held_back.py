"""Hosts whose cores cannot read samples as fast as their devices compute them."""

from __future__ import annotations

import pytest
from profiles import GIB, Card, block, line, profile, steady

from gpumix.cost.input import input_seconds
from gpumix.cost.predict import plan_seconds, predict
from gpumix.planner.base import predicted
from gpumix.planner.explain import plan as make_plan
from gpumix.planner.held_back import held_back
from gpumix.spec.plan import Plan
from gpumix.spec.profile import HostInput, Profile
from gpumix.spec.space import Space
from gpumix.train.tables import why

BATCH = 128
ONE_STAGE = Space(most_stages=1, tensor=1, leave_out=False)


def hosts(
    cpu_s: float,
    cores: tuple[float, float] = (4, 12),
    most: tuple[float | None, float | None] = (None, None),
) -> Profile:
    """A fast card on a host with few cores, a slow one where there are many. `most`: samples a
    second that their disks give."""
    cards = [
        Card("fast", 1, GIB, steady(0.5e-3), per_host=1),
        Card("slow", 1, GIB, steady(1.5e-3), per_host=1),
    ]
    found = profile(
        cards, calls=("block",), kinds=[block(trainable=1000, kept=line(10.0), backward=line(10.0))]
    )
    names = [device.host for device in found.cluster.devices]
    inputs = tuple(
        HostInput(host=host, cores=n, cpu_s_per_sample=cpu_s, most_samples_per_s=rate)
        for host, n, rate in zip(names, cores, most)
    )
    return found.model_copy(update={"inputs": inputs})


def samples(plan: Plan) -> tuple[int, ...]:
    return tuple(worker.samples for worker in plan.workers)


@pytest.mark.parametrize("cpu_s", [0.0, 1e-3, 4e-3, 10e-3, 16e-3, 50e-3])
def test_the_plan_is_that_of_brute_force(cpu_s):
    """Over all ways to divide the batch."""
    _is_best(hosts(cpu_s))


@pytest.mark.parametrize(
    ("most", "cpu_s"),
    [
        ((200.0, None), 0.0),
        ((200.0, None), 4e-3),
        ((None, 50.0), 4e-3),
        ((300.0, 300.0), 0.0),
        ((1e6, None), 4e-3),
        ((40.0, 1000.0), 0.0),
    ],
)
def test_the_plan_is_that_of_brute_force_where_a_disk_or_a_network_is_slow(most, cpu_s):
    _is_best(hosts(cpu_s, most=most))


def _is_best(found: Profile) -> None:
    plan = make_plan(found, BATCH, space=ONE_STAGE)
    best = min(plan_seconds(found, _with(plan, n)) for n in range(BATCH + 1))
    assert predicted(plan).step_s == pytest.approx(best, rel=0.01)
    bound_s = predicted(plan).bound_s
    assert bound_s is not None and bound_s <= best * (1 + 1e-9)


def _with(plan: Plan, fast: int) -> Plan:
    """So many samples for the first device, in the same micro-batches or larger ones."""
    (stage,) = plan.stages
    workers = [
        worker.model_copy(update={"samples": n, "micro_batch": min(n, BATCH)})
        for worker, n in zip(stage.workers, (fast, BATCH - fast))
    ]
    one = stage.model_copy(update={"workers": tuple(workers)})
    return plan.model_copy(update={"stages": (one,)})


def test_without_data_that_is_slow_nothing_changes():
    free, slow = hosts(0.0), hosts(1e-6)
    assert held_back(free) is None and held_back(slow) is None
    assert samples(make_plan(free, BATCH)) == samples(make_plan(slow, BATCH))


def test_a_fast_card_gets_no_more_than_its_host_can_prepare():
    found = hosts(16e-3, (2, 30))
    plan = make_plan(found, BATCH, space=ONE_STAGE)
    fast, slow = samples(plan)
    assert fast < slow < BATCH  # the card itself is three times as fast
    naive = make_plan(found.model_copy(update={"inputs": ()}), BATCH, space=ONE_STAGE)
    assert samples(naive)[0] > 2 * samples(naive)[1]
    assert plan_seconds(found, naive) > 1.5 * predicted(plan).step_s


def test_a_fast_card_gets_no_more_than_its_disk_gives():
    """However many cores there are."""
    found = hosts(1e-6, (64, 64), most=(100.0, None))
    plan = make_plan(found, BATCH, space=ONE_STAGE)
    fast, slow = samples(plan)
    assert fast < slow < BATCH
    naive = make_plan(hosts(1e-6, (64, 64)), BATCH, space=ONE_STAGE)
    assert samples(naive)[0] > 2 * samples(naive)[1]
    assert input_seconds(found, naive) == samples(naive)[0] / 100.0
    assert plan_seconds(found, naive) > 1.5 * predicted(plan).step_s


@pytest.mark.parametrize("cores", [(1, 8), (1, 2, 8), (1, 1.05, 2, 4, 8, 16)])
def test_alike_cards_on_unlike_hosts_get_what_their_hosts_can_prepare(cores):
    card = Card("card", len(cores), GIB, steady(0.5e-3), per_host=1)
    kinds = [block(trainable=1000, kept=line(10.0), backward=line(10.0))]
    found = profile([card], calls=("block",), kinds=kinds)
    read_s = 40e-3
    hosts_ = [device.host for device in found.cluster.in_rank_order()]
    inputs = tuple(
        HostInput(host=h, cores=n, cpu_s_per_sample=read_s) for h, n in zip(hosts_, cores)
    )
    found = found.model_copy(update={"inputs": inputs})
    plan = make_plan(found, BATCH, space=ONE_STAGE)
    assert {w.device_class for w in plan.workers} == {"card"}
    given = {w.host: w.samples for w in plan.workers}
    rest = found.model_copy(update={"inputs": ()})
    together_s = read_s * BATCH / sum(cores)
    assert together_s > predicted(make_plan(rest, BATCH, space=ONE_STAGE)).step_s
    # As soon as all read at once, but for what is rounded and for hosts that count as alike.
    assert predicted(plan).step_s <= 1.1 * together_s + read_s / min(cores)
    assert given.get(hosts_[0], 0) * 2 < given[hosts_[-1]]


def test_what_is_predicted_says_what_the_data_takes():
    found = hosts(16e-3)
    plan = make_plan(found, BATCH, space=ONE_STAGE)
    read_s = {host.host: 16e-3 / host.cores for host in found.inputs}
    expected = max(w.samples * read_s[w.host] for w in plan.workers)
    assert input_seconds(found, plan) == predict(found, plan).input_s == pytest.approx(expected)
    assert predict(found, plan).step_s >= expected


@pytest.mark.parametrize(("cpu_s", "told"), [(1e-5, "compute"), (1.0, "reading samples")])
def test_what_binds_is_told_where_it_is_the_data_too(cpu_s, told):
    lines = why(make_plan(hosts(cpu_s), BATCH, space=ONE_STAGE))
    assert any(line.startswith(f"what binds: {told}") for line in lines)


@pytest.mark.parametrize(
    ("cores", "cpu_s"), [((1, 1), 1e-3), ((1, 1), 30e-3), ((2, 30), 30e-3), ((30, 2), 30e-3)]
)
def test_data_never_makes_a_plan_faster(cores, cpu_s):
    found = hosts(cpu_s, cores)
    free = make_plan(found.model_copy(update={"inputs": ()}), BATCH, space=ONE_STAGE)
    plan = make_plan(found, BATCH, space=ONE_STAGE)
    assert predicted(plan).step_s >= predicted(free).step_s * (1 - 1e-9)
    assert predicted(plan).step_s <= plan_seconds(found, free) * (1 + 1e-9)
