"""Laws that every optimal plan must obey, whatever the profile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.plan import STRATEGIES, plan
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.cluster.network import Network
from gpumix.schema.curve import Curve
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.profile.profile import ROOT, Profile
from gpumix.schema.value import Value
from helpers.draws import examples
from helpers.paths import TESTS
from helpers.plans.brute import linked, linked_profiles, plan_of, small_profiles, step_of
from helpers.plans.profiles import fleet, shuffled

EASY = examples(5)
FEW = examples(3)
BATCHES = st.integers(1, 12)
PROFILES = st.one_of(small_profiles(), linked_profiles())


@EASY
@given(PROFILES, BATCHES)
def test_a_plan_is_whole_and_fits(profile, batch):
    plan = plan_of(profile, batch)
    assume(plan is not None)
    assert sum(w.samples for w in plan.workers) == batch
    pools = {w.host for w in plan.workers} if plan.sharding == "host" else {""}
    for pool in pools:
        shares = [w.state_share for w in plan.workers if pool in ("", w.host)]
        assert sum(shares) == pytest.approx(1, abs=1e-9)
    there, used = {d.id for d in profile.cluster.devices}, {w.device for w in plan.workers}
    assert len(plan.workers) == len(used)
    assert used == there or (used < there and profile.cluster.network is not None)
    for worker, predicted in zip(plan.workers, plan.prediction.workers):
        assert predicted.peak_bytes <= predicted.memory_limit_bytes
        largest = profile.of_class(worker.device_class).largest_micro_batch
        assert worker.micro_batch <= (largest or batch)


@pytest.mark.extended
@EASY
@given(PROFILES, BATCHES, st.randoms(use_true_random=False))
def test_the_order_of_devices_and_classes_does_not_matter(profile, batch, dice):
    assert plan_of(shuffled(profile, dice), batch) == plan_of(profile, batch)


@pytest.mark.extended
@EASY
@given(PROFILES, BATCHES)
def test_devices_of_a_class_are_interchangeable(profile, batch):
    """Moving the devices to other places in the rank order moves their parts along."""
    devices = profile.cluster.devices
    moved = [d.model_copy(update={"ordinal": len(devices) - i}) for i, d in enumerate(devices)]
    cluster = profile.cluster.model_copy(update={"devices": tuple(moved)})
    plan, other = (
        plan_of(profile, batch),
        plan_of(profile.model_copy(update={"cluster": cluster}), batch),
    )
    assert (plan is None) == (other is None)
    if plan is not None:
        assert sorted(plan.workers, key=lambda w: w.device) == sorted(
            other.workers, key=lambda w: w.device
        )


@pytest.mark.extended
@EASY
@given(PROFILES, BATCHES, st.sampled_from([2**-7, 0.3, 1000.0]))
def test_the_answer_scales_with_the_times(profile, batch, factor):
    step, other = step_of(profile, batch), step_of(slowed(profile, factor), batch)
    assert other == (step and pytest.approx(step * factor, rel=1e-9))


@pytest.mark.extended
@EASY
@given(PROFILES, BATCHES, st.integers(1, 30_000))
def test_more_memory_is_never_worse(profile, batch, extra):
    name = profile.cluster.classes[0].name
    classes = tuple(
        c.model_copy(update={"memory_bytes": c.memory_bytes + extra * (c.name == name)})
        for c in profile.cluster.classes
    )
    cluster = profile.cluster.model_copy(update={"classes": classes})
    assert_no_worse(
        step_of(profile, batch), step_of(profile.model_copy(update={"cluster": cluster}), batch)
    )


@EASY
@given(small_profiles(), BATCHES)
def test_one_more_device_is_never_worse(profile, batch):
    """Of a known class, where no collective takes memory or wants equal shares. The times of the
    collectives are those of all ranks, however many there are."""
    forms = profile.collectives.model_copy(update={"reduce": "list"})
    gathers = [t for t in profile.network if t.operation == "gather" and t.form != "native"]
    profile = profile.model_copy(update={"collectives": forms, "network": tuple(gathers)})
    one = profile.cluster.devices[0]
    more = (*profile.cluster.devices, one.model_copy(update={"id": "one-more"}))
    cluster = profile.cluster.model_copy(update={"devices": more})
    other = profile.model_copy(update={"cluster": cluster})
    assert_no_worse(step_of(profile, batch), step_of(other, batch))


@pytest.mark.extended
@FEW
@given(linked_profiles(), linked_profiles(), BATCHES)
def test_a_class_more_is_never_worse_where_links_are_stated(profile, other, batch):
    """It can be left out. Its devices stand on hosts of the others, and on one of its own."""
    like = other.classes[0]
    times = dict.fromkeys((*profile.model.kind_of_call, ROOT), like.units[ROOT])
    in_chunks = like.chunked_cross_entropy if profile.model.root.chunked_cross_entropy else None
    hosts = (profile.cluster.devices[0].host, "a-host-more")
    new = [
        Device(id=f"new-{i}", device_class="new", host=host, ordinal=9)
        for i, host in enumerate(hosts)
    ]
    one = profile.cluster.classes[0]
    cluster = profile.cluster.model_copy(
        update={
            "classes": (*profile.cluster.classes, one.model_copy(update={"name": "new"})),
            "devices": (*profile.cluster.devices, *new),
        }
    )
    dtype = profile.classes[0].compute_dtype  # memory is known in this model's dtypes only
    changed = {
        "device_class": "new",
        "units": times,
        "compute_dtype": dtype,
        "chunked_cross_entropy": in_chunks,
    }
    of_class = like.model_copy(update=changed)
    larger = profile.model_copy(
        update={"cluster": cluster, "classes": (*profile.classes, of_class)}
    )
    assert_no_worse(step_of(profile, batch), step_of(larger, batch))


@FEW
@given(linked_profiles(), BATCHES, st.data())
def test_a_host_more_is_never_worse_where_links_are_stated(profile, batch, data):
    """It can be left out, whatever stands there."""
    names = [c.name for c in profile.cluster.classes]
    on_it = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))
    new = [
        Device(id=f"new-{i}", device_class=name, host="a-host-more", ordinal=i)
        for i, name in enumerate(on_it)
    ]
    cluster = profile.cluster.model_copy(update={"devices": (*profile.cluster.devices, *new)})
    larger = profile.model_copy(update={"cluster": cluster})
    assert_no_worse(step_of(profile, batch), step_of(larger, batch))


@FEW
@given(linked_profiles(), BATCHES, st.data())
def test_a_device_more_is_never_worse_where_links_are_stated(profile, batch, data):
    """It can be left out, so that no ring has to pass through it."""
    like = data.draw(st.sampled_from(profile.cluster.devices))
    new = like.model_copy(update={"id": "one-more", "ordinal": 99})
    cluster = profile.cluster.model_copy(update={"devices": (*profile.cluster.devices, new)})
    larger = profile.model_copy(update={"cluster": cluster})
    assert_no_worse(step_of(profile, batch), step_of(larger, batch))


def assert_no_worse(before: float | None, after: float | None) -> None:
    if before is not None:
        assert after is not None
        assert after <= before * (1 + 1e-9)


def slowed(profile: Profile, factor: float) -> Profile:
    """The profile with all that is in seconds `factor` times as long."""

    def slower(value):
        if isinstance(value, Curve):
            return value.model_copy(update={"values": tuple(v * factor for v in value.values)})
        if isinstance(value, Value):
            return value.model_copy(update={name: slower(of) for name, of in value})
        if isinstance(value, tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found = {key: slower(item) for key, item in items}
            return found if isinstance(value, dict) else tuple(found.values())
        return value

    classes = tuple(
        c.model_copy(
            update={
                "optimizer_s_per_element": c.optimizer_s_per_element * factor,
                "units": slower(c.units),
                "host_copy": slower(c.host_copy),
                "chunked_cross_entropy": slower(c.chunked_cross_entropy),
                "host_optimizer_s_per_element": c.host_optimizer_s_per_element
                and c.host_optimizer_s_per_element * factor,
            }
        )
        for c in profile.classes
    )
    cluster = profile.cluster.model_copy(update={"network": slower(profile.cluster.network)})
    return profile.model_copy(
        update={
            "classes": classes,
            "network": slower(profile.network),
            "cluster": cluster,
            "step_overhead_s": profile.step_overhead_s * factor,
        }
    )


def test_the_same_plan_under_any_hash_seed():
    code = "from test_planner_laws import plans_of_a_fleet; print(plans_of_a_fleet())"
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert os.environ.get("PYTHONHASHSEED") != "1"
    assert other == plans_of_a_fleet() + "\n"


def plans_of_a_fleet() -> str:
    """With what was measured of its links, and with links that are stated."""
    found = fleet(8, memory_factor=0.5, layers=8)
    stated = linked(found, Network(inside="pcie4", between="25GbE"))
    reasoned = plan(found, 100, space=EVERYTHING.in_one_stage())
    fastest = STRATEGIES["optimal"](stated, PlanRequest(global_batch=20))
    return "\n".join(one.model_dump_json() for one in (reasoned, fastest))
