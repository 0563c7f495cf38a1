"""Plans where some devices are nearer to each other: islands of a host, and racks of hosts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.pipeline_parallel.candidate import form_tensor_parallel_groups
from gpumix.planner.pipeline_parallel.device_order import list_rows
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.planner.plan import STRATEGIES
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.cluster.link_islands import Links, PairTimes, add_found_islands
from gpumix.schema.cluster.network import Link, Network
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.profile.profile import CollectiveTimes, Profile, RankGroup
from helpers.errors import raises
from helpers.extended import every_third, left_out
from helpers.plans.every_stage import least_s
from helpers.plans.profiles import GIB, Card, block, in_a_row, line, profile, steady, with_tp_groups

FAST, SLOW = 1e9, 2e6  # bytes/s
SPACE = Space(
    zero_stages=(0, 1),
    gradient_checkpointing=True,
    pipeline_schedules="1f1b",
    cross_entropy="whole",
)


def cluster(count: int, per_host: int, *, calls: int = 4) -> Profile:
    """Devices of one class."""
    found = profile(
        [Card("card", count, GIB, steady(1e-3), per_host=per_host)],
        calls=("block",) * calls,
        kinds=[block(trainable=5000)],
    )
    return in_a_row(found, message=line(1e3))


def curve(rate: float) -> Curve:
    return Curve(sizes=(1.0, 1e9), values=(1e-6, 1e9 / rate))


def measured(found: Profile, what: RankGroup) -> Profile:
    """Where even devices are near to each other, and odd ones, and all others far."""
    devices = found.cluster.in_rank_order()
    pairs = [
        PairTimes(one=a, other=b, times=curve(SLOW if (a - b) % 2 else FAST))
        for a, b in combinations(range(len(devices)), 2)
    ]
    devices = add_found_islands(devices, pairs)
    operations = (("gather", "list"), ("reduce", "list"), ("sum", "native"))
    groups: tuple[tuple[RankGroup, float], ...] = (("all", SLOW), (what, FAST))
    return found.model_copy(
        update={
            "cluster": found.cluster.model_copy(update={"devices": devices}),
            "links": Links.of(devices, pairs),
            "network": tuple(
                CollectiveTimes(operation=operation, form=form, group=group, times=curve(rate))
                for operation, form in operations
                for group, rate in groups
            ),
            "collectives": Collectives(gather="list", reduce="list"),
        }
    )


def stated(found: Profile, what: str) -> Profile:
    """The same, as a cluster says it."""
    fast, slow = Link.stated(FAST, 1e-6), Link.stated(SLOW, 1e-6)
    links = (
        {"island": fast, "inside": slow} if what == "island" else {"rack": fast, "between": slow}
    )
    devices = tuple(
        device.model_copy(update={what: ["even", "odd"][number % 2]})
        for number, device in enumerate(found.cluster.in_rank_order())
    )
    update = {"devices": devices, "network": Network(**links)}
    return found.model_copy(update={"cluster": found.cluster.model_copy(update=update)})


CLUSTERS: dict[str, Callable[[int], Profile]] = {
    "islands": lambda calls: measured(cluster(4, 4, calls=calls), "island"),
    "racks": lambda calls: measured(cluster(4, 1, calls=calls), "rack"),
    "stated islands": lambda calls: stated(cluster(4, 4, calls=calls), "island"),
    "stated racks": lambda calls: stated(cluster(4, 1, calls=calls), "rack"),
}


@pytest.mark.parametrize("name", left_out(CLUSTERS, CLUSTERS.keys() - {"islands"}))
def test_stages_are_of_devices_that_are_near(name):
    """Listed in turn. Sums of gradients over slow links take long, messages are small."""
    found = CLUSTERS[name](4)
    space = SPACE.model_copy(update={"max_pipeline_stages": 2})
    plan = plan_staged(found, PlanRequest(global_batch=4, space=space))
    groups = {frozenset(w.device for w in stage.workers) for stage in plan.stages}
    assert groups == {frozenset({"card-0", "card-2"}), frozenset({"card-1", "card-3"})}


@pytest.mark.parametrize(
    ("name", "calls"), every_third([("islands", 2), ("islands", 3), ("stated racks", 3)])
)
def test_no_plan_is_faster(name, calls):
    found = CLUSTERS[name](calls)
    space = SPACE if calls > 2 else SPACE.model_copy(update={"zero_stages": (1,)})
    plan = plan_staged(found, PlanRequest(global_batch=2, space=space))
    assert get_prediction(plan).step_s == pytest.approx(least_s(found, 2, space))


@pytest.mark.parametrize("name", ["islands", "racks"])
def test_a_message_takes_what_its_own_link_takes(name):
    """Between two stages of one device each."""
    found = CLUSTERS[name](4)

    def step_s(*devices: str) -> float:
        request = PlanRequest(global_batch=1, devices=devices, space=SPACE)
        return get_prediction(plan_staged(found, request)).step_s

    assert step_s("card-1", "card-2") - step_s("card-0", "card-2") == pytest.approx(
        2 * 1e3 / SLOW, rel=0.05
    )


def test_of_many_devices_groups_follow_islands_and_racks():
    """Twelve hosts of eight in three racks, listed in turn, with four islands each."""
    found = cluster(96, 8)
    devices = tuple(
        d.model_copy(update={"island": str(d.ordinal % 4), "rack": f"r{int(d.host[5:]) % 3}"})
        for d in found.cluster.devices
    )
    every, complete = list_rows(devices, 16)
    assert not complete
    made = [[{(d.rack) for d in group} for group in row] for row in every]
    assert [{"r0"}, {"r1"}, {"r2"}] in made
    assert any(len(row) == 6 and all(len(racks) == 1 for racks in row) for row in made)


def test_tp_groups_keep_to_an_island():
    found = stated(cluster(4, 4), "island")
    found = with_tp_groups(found, 2, faster=2.0)
    space = Space(tensor_parallel_size=2, pipeline_schedules="1f1b", cross_entropy="whole")
    pairs = [["card-0", "card-2"], ["card-1", "card-3"]]
    devices = found.cluster.in_rank_order()
    assert [
        [d.id for d in tp_group] for tp_group in form_tensor_parallel_groups(devices, 2)
    ] == pairs
    for strategy in ("optimal", "staged"):
        plan = STRATEGIES[strategy](found, PlanRequest(global_batch=4, space=space))
        tp_groups = [
            [w.device for w in tp_group] for stage in plan.stages for tp_group in stage.tp_groups
        ]
        assert sorted(set(map(tuple, tp_groups))) == list(map(tuple, pairs))


def test_no_tp_group_is_larger_than_an_island():
    found = with_tp_groups(stated(cluster(4, 4), "island"), 4, faster=4.0)
    with raises(InputError, code="tensor-parallel-size-too-large", what=("island", 4)):
        make_plan(found, 4, space=Space(tensor_parallel_size=4))
