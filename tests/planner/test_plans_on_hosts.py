"""Parameters on hosts: where nothing else fits, where they pay, and what such a plan costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.optimal import plan_fastest
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Collectives, Plan
from helpers.errors import raises
from helpers.plans.profiles import (
    Card,
    Network,
    block,
    curve,
    in_a_row,
    line,
    profile,
    steady,
    with_tp_groups,
)

HOST = Space(parameters_on=("host",))
EITHER = Space(parameters_on=("device", "host"), zero_stages=(3,))
SAMPLE_S, ELEMENTS, CALLS, BATCH = 1.0, 1000, 4, 6
COPY_S = 5.0  # of the parameters of a block
FAST = Card(
    "fast",
    1,
    10**9,
    steady(SAMPLE_S),
    host_copy=line(COPY_S / (4 * ELEMENTS)),
    host_optimizer_s_per_element=0.25 / ELEMENTS,
)
SLOW = replace(
    FAST, name="slow", times=steady(2 * SAMPLE_S), host_copy=line(4 * COPY_S / (4 * ELEMENTS))
)
FROZEN = 40_000  # bytes of each block


def plan_of(found, space, batch=BATCH) -> Plan:
    return plan_fastest(found, PlanRequest(global_batch=batch, space=space))


@pytest.mark.parametrize("early", [False, True])
def test_a_step_takes_what_is_longest_in_each_block(early):
    found = profile([FAST]).model_copy(update={"updates_early": early})
    plan = plan_of(found, HOST)
    assert plan.parameters_on == "host"
    assert {worker.state_on for worker in plan.workers} == {"host"}
    forward, backward = BATCH * SAMPLE_S, 3 * BATCH * SAMPLE_S
    update = 0.25  # of a block
    # Nothing hides the first block's copy, its gradient's, and its update.
    expected = COPY_S + CALLS * max(forward, COPY_S) + CALLS * max(backward, COPY_S) + COPY_S
    expected += update if early else CALLS * update
    assert plan.prediction.step_s == pytest.approx(expected)


def test_links_that_are_slower_than_computing_set_the_time():
    plan = plan_of(profile([FAST]), HOST, batch=1)
    # Each block in, forward; in the backward pass the next one in, or a gradient out, beside each;
    # and the last gradient. Of computing, the last block's forward alone is seen.
    copies = CALLS + CALLS + 1
    least = copies * COPY_S + SAMPLE_S + CALLS * 0.25
    assert plan.prediction.step_s == pytest.approx(least)


def test_each_device_is_counted_with_its_own_link():
    found = profile([FAST, SLOW])
    plan = plan_of(found, HOST, batch=64)
    shares = {worker.device_class: worker.state_share for worker in plan.workers}
    assert shares == {"fast": 0.5, "slow": 0.5}
    of_fast, of_slow = plan.prediction.workers
    samples = {worker.device_class: worker.samples for worker in plan.workers}
    assert of_fast.forward_s == pytest.approx(COPY_S + CALLS * samples["fast"] * SAMPLE_S)
    slow_s = 4 * COPY_S
    per_block = samples["slow"] * 2 * SAMPLE_S
    rest = (CALLS - 1) * max(per_block, slow_s) + per_block
    assert of_slow.forward_s == pytest.approx(slow_s + rest)


def frozen(memory: int, **changes: object):
    """Blocks with a frozen base, of which a device has room for two."""
    card = replace(FAST, memory=memory, **changes)
    return profile([card], kinds=[block(trainable=ELEMENTS, frozen=FROZEN)])


def test_hosts_keep_parameters_where_nothing_else_fits():
    room = 140_000
    plan = plan_of(frozen(room), Space())
    assert plan.parameters_on == "host"
    (worker,) = plan.prediction.workers
    assert worker.peak_bytes <= room
    # Masters, gradients, state of AdamW, the base, and two rows in which gradients arrive.
    per_block = ELEMENTS * (4 + 4 + 8) + FROZEN
    assert worker.host_bytes == CALLS * per_block + 2 * 4 * ELEMENTS
    assert plan_of(frozen(10**9), Space()).parameters_on == "device"


def test_where_only_hosts_have_room_the_plan_is_the_fastest_on_hosts():
    """In one wave on all devices, which are searched too for waves and classes that fit."""
    slow = replace(FAST, name="slow", times=steady(1.2 * SAMPLE_S))
    blocks = [block(trainable=ELEMENTS, frozen=FROZEN)]
    cards = [replace(card, memory=140_000) for card in (FAST, slow)]
    found = profile(cards, kinds=blocks)
    on_hosts, any_place = (plan_of(found, space, batch=64) for space in (HOST, Space()))
    assert on_hosts.waves == 1 and len(on_hosts.workers) == 2
    assert any_place.prediction.step_s == on_hosts.prediction.step_s


def test_stages_and_tp_groups_take_no_part_where_parameters_are_on_hosts():
    found = with_tp_groups(in_a_row(profile([replace(FAST, count=2)])), 2, faster=1.9)
    for space, places in ((HOST, {"host"}), (EITHER, {"device", "host"})):
        assert plan_of(found, space).parameters_on in places
    slow = in_a_row(profile([replace(FAST, count=2, host_copy=line(10.0))]))
    plan = plan_of(slow, HOST, batch=2)
    assert (plan.parameters_on, len(plan.stages)) == ("host", 1)


def test_memory_of_the_host_is_a_limit():
    needed = CALLS * (ELEMENTS * 16 + FROZEN) + 2 * 4 * ELEMENTS
    assert plan_of(frozen(140_000, host_bytes=needed), Space()).parameters_on == "host"
    with raises(NoFeasiblePlanError, code="no-plan-fits"):
        plan_of(frozen(140_000, host_bytes=needed - 1000), Space())


@pytest.mark.parametrize(
    "space",
    [
        Space(parameters_on=("device",)),
        Space(state_on=("device",)),
        Space(zero_stages=(0, 1, 2)),
    ],
    ids=["devices only", "state on devices", "below stage 3"],
)
def test_the_space_may_leave_hosts_out(space):
    with pytest.raises(NoFeasiblePlanError):
        plan_of(frozen(140_000), space)


def test_a_class_without_measured_copies_keeps_parameters_on_devices():
    for space in (Space(), HOST):
        with pytest.raises(NoFeasiblePlanError):
            plan_of(frozen(140_000, host_copy=None), space)
    with raises(NoFeasiblePlanError, code="parameters-exceed-hosts"):
        plan_of(profile([replace(FAST, host_copy=None)]), HOST)


def test_hosts_keep_parameters_where_that_is_faster():
    forms = Collectives(gather="broadcast", reduce="all_to_all")
    for seconds, place in ((1e-3, "device"), (1e3, "host")):
        between = curve(seconds, seconds, sizes=(1, 1e6))
        network = Network(
            gather={"broadcast": between}, reduce={"all_to_all": between}, chosen=forms
        )
        # Meetings take as long as next to no bytes between devices.
        slow = {"gather": {"broadcast": curve(1e-3, seconds, sizes=(1, 4000))}}
        slow |= {"reduce": {"all_to_all": curve(1e-3, seconds, sizes=(1, 4000))}}
        found = profile([replace(FAST, count=2)], network=replace(network, **slow))
        assert (
            plan_of(found, EITHER.model_copy(update={"zero_stages": (3,)})).parameters_on == place
        )


def test_a_finished_plan_is_predicted_as_the_search_says():
    found = profile([FAST, SLOW], kinds=[block(trainable=ELEMENTS, frozen=FROZEN)])
    plan = plan_of(found, HOST)
    assert predict(found, plan).step_s == pytest.approx(plan.prediction.step_s)
    assert plan.prediction.bound_s <= plan.prediction.step_s * (1 + 1e-9)
