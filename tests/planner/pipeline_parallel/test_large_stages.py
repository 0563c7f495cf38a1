"""Stages of large clusters are searched on a part of the hosts, and built of all."""

from __future__ import annotations

from collections import Counter

import pytest

from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.pipeline_parallel import host_reduction
from gpumix.planner.pipeline_parallel.host_reduction import MOST_DEVICES, reduce_hosts
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.schema.cluster.network import Link, Network
from gpumix.schema.job.search_space import Space
from gpumix.schema.profile.profile import Profile
from helpers.plans.profiles import GIB, Card, block, in_a_row, line, profile, steady

SPACE = Space(
    pipeline_schedules="1f1b",
    gradient_checkpointing=True,
    cross_entropy="whole",
    max_pipeline_stages=2,
)


def cluster(*hosts: int, trainable: int = 5_000_000) -> Profile:
    """So many hosts of eight cards, of a class each."""
    found = profile(
        [Card(f"c{n}", 8 * count, GIB, steady(1e-3), per_host=8) for n, count in enumerate(hosts)],
        calls=("block",) * 4,
        kinds=[block(trainable=trainable)],
        links=Network(inside=Link.stated(10e9, 1e-6), between=Link.stated(1e8, 1e-6)),
    )
    return in_a_row(found, message=line(1e3))


@pytest.mark.parametrize(
    ("hosts", "batch"), [((16,), 256), ((17, 4), 256), ((32,), 255)], ids=["few", "kinds", "batch"]
)
def test_what_has_no_common_part_is_left_whole(hosts, batch):
    assert reduce_hosts(cluster(*hosts), PlanRequest(global_batch=batch)) is None


def test_racks_are_left_whole():
    found = cluster(32)
    devices = tuple(d.model_copy(update={"rack": "r"}) for d in found.cluster.devices)
    racks = found.model_copy(
        update={"cluster": found.cluster.model_copy(update={"devices": devices})}
    )
    assert reduce_hosts(racks, PlanRequest(global_batch=256)) is None


def test_a_part_has_hosts_of_every_kind():
    found = cluster(32, 16)
    reduced = reduce_hosts(found, PlanRequest(global_batch=768))
    assert reduced is not None
    class_of = {device.id: device.device_class for device in found.cluster.devices}
    kept = Counter(class_of[device] for device in reduced.request.devices)
    assert sum(kept.values()) <= MOST_DEVICES and kept["c0"] == 2 * kept["c1"]
    number = len(class_of) // sum(kept.values())
    assert reduced.request.global_batch == 768 // number
    stood_for = [device.id for alike in reduced.copies.values() for device in alike]
    assert sorted(stood_for) == sorted(class_of)
    for device, alike in reduced.copies.items():
        assert {class_of[device]} == {one.device_class for one in alike}


def test_the_plan_of_all_is_whole_and_counted():
    found, request = cluster(32), PlanRequest(global_batch=512, space=SPACE)
    plan = plan_staged(found, request)
    assert len({w.device for w in plan.workers}) == len(plan.workers) == 256
    for stage in plan.stages:
        assert sum(worker.samples for worker in stage.workers) == 512
        assert sum(stage.shares) == pytest.approx(1)
    expected = get_prediction(plan)
    assert predict(found, plan).step_s == expected.step_s
    assert all(one.peak_bytes <= one.memory_limit_bytes for one in expected.workers)


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "batch"), [((32,), 512), ((32, 16), 768)])
def test_the_plan_is_about_as_fast_as_one_searched_among_all(hosts, batch, monkeypatch):
    found, request = cluster(*hosts), PlanRequest(global_batch=batch, space=SPACE)
    assert reduce_hosts(found, request) is not None
    of_part = get_prediction(plan_staged(found, request)).step_s
    monkeypatch.setattr(host_reduction, "MOST_DEVICES", 10_000)
    assert reduce_hosts(found, request) is None
    assert of_part <= 1.05 * get_prediction(plan_staged(found, request)).step_s
