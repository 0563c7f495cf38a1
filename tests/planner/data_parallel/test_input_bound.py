"""Hosts whose cores cannot read samples as fast as their devices compute them."""

from __future__ import annotations

from functools import cache

import pytest

from gpumix.cost.input_time import compute_host_read_rates, compute_input_seconds
from gpumix.cost.predict import predict, predict_step_seconds
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.data_parallel.input_bound import slow_down_to_input
from gpumix.planner.plan import STRATEGIES
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.cluster.network import Link, Network
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import HostInput, Profile
from gpumix.train.console.tables import explain_plan
from helpers.extended import every_second, every_third
from helpers.plans.profiles import GIB, Card, block, in_a_row, line, profile, steady

BATCH = 64
ONE_STAGE = Space(max_pipeline_stages=1, tensor_parallel_size=1, leave_out=False)


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


def planned(found: Profile, batch: int = BATCH) -> Plan:
    """The fastest plan of one stage, without reasons."""
    return STRATEGIES["optimal"](found, PlanRequest(global_batch=batch, space=ONE_STAGE))


def samples(plan: Plan) -> tuple[int, ...]:
    return tuple(worker.samples for worker in plan.workers)


@pytest.mark.parametrize("cpu_s", every_third([0.0, 1e-3, 4e-3, 16e-3, 10e-3, 50e-3]))
def test_the_plan_is_that_of_brute_force(cpu_s):
    """Over all ways to divide the batch."""
    _is_best(hosts(cpu_s))


@pytest.mark.parametrize(
    ("most", "cpu_s"),
    every_third(
        [
            ((200.0, None), 0.0),
            ((200.0, None), 4e-3),
            ((300.0, 300.0), 0.0),
            ((None, 50.0), 4e-3),
            ((1e6, None), 4e-3),
            ((40.0, 1000.0), 0.0),
        ]
    ),
)
def test_the_plan_is_that_of_brute_force_where_a_disk_or_a_network_is_slow(most, cpu_s):
    _is_best(hosts(cpu_s, most=most))


def _is_best(found: Profile) -> None:
    plan = planned(found)
    best = min(predict_step_seconds(found, _with(plan, n)) for n in range(BATCH + 1))
    assert get_prediction(plan).step_s == pytest.approx(best, rel=0.01)
    bound_s = get_prediction(plan).bound_s
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


@pytest.mark.parametrize(
    ("readers", "cpu_s"), every_second([(1, 4e-3), (1, 10e-3), (2, 10e-3), (20, 10e-3)])
)
def test_the_plan_is_that_of_brute_force_where_readers_are_few(readers, cpu_s):
    _is_best(with_readers(hosts(cpu_s), readers))


def with_readers(found: Profile, readers: int, wait_s: float = 0.0) -> Profile:
    update = {"readers": readers, "wait_s_per_sample": wait_s}
    inputs = tuple(one.model_copy(update=update) for one in found.inputs)
    return found.model_copy(update={"inputs": inputs})


@pytest.mark.parametrize(
    ("readers", "cpu_s", "wait_s", "cores", "sample_s"),
    [
        (1, 20e-3, 0.0, 4, 20e-3),  # one thread has one core, of however many
        (3, 20e-3, 0.0, 4, 20e-3 / 3),
        (8, 20e-3, 0.0, 4, 20e-3 / 4),
        (2, 0.0, 30e-3, 4, 30e-3 / 2),  # what waits needs no core, and yet a reader
        (2, 0.0, 0.0, 4, 0.0),
    ],
)
def test_a_rank_reads_with_no_more_than_its_readers(readers, cpu_s, wait_s, cores, sample_s):
    found = with_readers(hosts(cpu_s, (cores, cores)), readers, wait_s)
    plan = _with(planned_without_data(), 24)
    assert compute_input_seconds(found, plan) == pytest.approx((BATCH - 24) * sample_s)


@cache
def planned_without_data() -> Plan:
    return planned(hosts(0.0))


def test_the_readers_of_a_host_are_those_of_all_its_ranks():
    """Three ranks with one reader each, on four cores: of unlike ranks the busiest one waits."""
    card = Card("card", 3, GIB, steady(0.5e-3), per_host=3)
    kinds = [block(trainable=1000, kept=line(10.0), backward=line(10.0))]
    found = profile([card], calls=("block",), kinds=kinds)
    (host,) = {device.host for device in found.cluster.devices}
    read_s = 40e-3
    one = HostInput(host=host, cores=4, cpu_s_per_sample=read_s, readers=1)
    found = found.model_copy(update={"inputs": (one,)})
    assert compute_host_read_rates(found) == {host: pytest.approx(3 / read_s)}
    plan = planned(found, 90)
    most = max(worker.samples for worker in plan.workers)
    assert get_prediction(plan).input_s == pytest.approx(most * read_s)
    assert most == 30
    free = found.model_copy(update={"inputs": (one.model_copy(update={"readers": None}),)})
    assert compute_host_read_rates(free) == {host: pytest.approx(4 / read_s)}


def test_without_data_that_is_slow_nothing_changes():
    free, slow = hosts(0.0), hosts(1e-6)
    assert slow_down_to_input(free) is None and slow_down_to_input(slow) is None
    assert samples(planned(free)) == samples(planned(slow))


def test_a_fast_card_gets_no_more_than_its_host_can_prepare():
    found = hosts(16e-3, (2, 30))
    plan = planned(found)
    fast, slow = samples(plan)
    assert fast < slow < BATCH  # the card itself is three times as fast
    naive = planned(found.model_copy(update={"inputs": ()}))
    assert samples(naive)[0] > 2 * samples(naive)[1]
    assert predict_step_seconds(found, naive) > 1.5 * get_prediction(plan).step_s


def test_a_fast_card_gets_no_more_than_its_disk_gives():
    """However many cores there are."""
    found = hosts(1e-6, (64, 64), most=(100.0, None))
    plan = planned(found)
    fast, slow = samples(plan)
    assert fast < slow < BATCH
    naive = planned(hosts(1e-6, (64, 64)))
    assert samples(naive)[0] > 2 * samples(naive)[1]
    assert compute_input_seconds(found, naive) == samples(naive)[0] / 100.0
    assert predict_step_seconds(found, naive) > 1.5 * get_prediction(plan).step_s


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
    plan = planned(found)
    assert {w.device_class for w in plan.workers} == {"card"}
    given = {w.host: w.samples for w in plan.workers}
    rest = found.model_copy(update={"inputs": ()})
    together_s = read_s * BATCH / sum(cores)
    assert together_s > get_prediction(planned(rest)).step_s
    # As soon as all read at once, but for what is rounded and for hosts that count as alike.
    assert get_prediction(plan).step_s <= 1.1 * together_s + read_s / min(cores)
    assert given.get(hosts_[0], 0) * 2 < given[hosts_[-1]]


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "batch"), every_third([(4, 16), (8, 16), (8, 32)]))
def test_stages_that_there_may_be_make_no_plan_slower(calls, batch):
    """All stages read their samples."""
    kinds = [block(trainable=10_000, kept=line(1e4), gradient=line(1e4), forward=line(1e4))]
    cards = [
        Card("new", 2, GIB, steady(1e-3), per_host=2),
        Card("old", 2, GIB, steady(3e-3), per_host=2),
    ]
    links = Network(inside=Link.stated(10e9, 1e-5), between=Link.stated(100e6, 1e-5))
    found = profile(cards, calls=("block",) * calls, kinds=kinds, links=links)
    found = in_a_row(found, message=line(1e4))
    names = dict.fromkeys(device.host for device in found.cluster.devices)
    inputs = tuple(
        HostInput(host=host, cores=1, cpu_s_per_sample=read_s)
        for host, read_s in zip(names, (40e-3, 10e-3))
    )
    found = found.model_copy(update={"inputs": inputs})
    one_stage = get_prediction(planned(found, batch)).step_s
    any_stages = STRATEGIES["optimal"](found, PlanRequest(global_batch=batch))
    assert get_prediction(any_stages).step_s <= one_stage * (1 + 1e-9)


def test_a_class_alone_is_compared_with_what_its_host_reads():
    """Either alone waits for its host: no less than reading the batch takes there."""
    found = hosts(16e-3)
    plan = make_plan(found, BATCH, space=Space(max_pipeline_stages=1, tensor_parallel_size=1))
    assert plan.reasons is not None
    alone = {one.strategy: one.step_s for one in plan.reasons.alternatives}
    for name, cores in (("fast", 4), ("slow", 12)):
        assert alone[f"only {name}"] >= BATCH * 16e-3 / cores * (1 - 1e-9)
    assert plan.reasons.worth == ()


def test_what_is_predicted_says_what_the_data_takes():
    found = hosts(16e-3)
    plan = planned(found)
    read_s = {host.host: 16e-3 / host.cores for host in found.inputs}
    expected = max(w.samples * read_s[w.host] for w in plan.workers)
    assert (
        compute_input_seconds(found, plan)
        == predict(found, plan).input_s
        == pytest.approx(expected)
    )
    assert predict(found, plan).step_s >= expected


@pytest.mark.parametrize(
    ("cpu_s", "told"), every_second([(1.0, "reading samples"), (1e-5, "compute")])
)
def test_what_binds_is_told_where_it_is_the_data_too(cpu_s, told):
    lines = explain_plan(make_plan(hosts(cpu_s), BATCH, space=ONE_STAGE))
    assert any(line.startswith(f"bottleneck: {told}") for line in lines)


@pytest.mark.parametrize(
    ("cores", "cpu_s"),
    every_second([((1, 1), 1e-3), ((1, 1), 30e-3), ((2, 30), 30e-3), ((30, 2), 30e-3)]),
)
def test_data_never_makes_a_plan_faster(cores, cpu_s):
    found = hosts(cpu_s, cores)
    free = planned(found.model_copy(update={"inputs": ()}))
    plan = planned(found)
    assert get_prediction(plan).step_s >= get_prediction(free).step_s * (1 - 1e-9)
    assert get_prediction(plan).step_s <= predict_step_seconds(found, free) * (1 + 1e-9)
