"""The step time of a plan by hand, and what it depends on; `test_naive_walk.py` has any plan."""

from __future__ import annotations

import pytest

from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.network.buckets import ONE_UNIT_PER_BUCKET, build_buckets
from gpumix.cost.network.collective_times import CollectiveSeconds
from gpumix.cost.predict import predict
from gpumix.cost.step_time import compute_pass_seconds
from gpumix.planner.baselines.even import plan_even
from gpumix.planner.common.strategy import PlanRequest
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import ROOT, UnitTimes
from helpers.errors import raises
from helpers.plans.profiles import Card, Network, block, curve, line, profile, root
from helpers.plans.random_plans import links_of

STAGE_3 = Space(zero_stages=(3,))


def two_cards(network=None, count=1):
    """A fast and a slow card; 2 calls of 1000 elements; 1 and 2 s forward a sample and call."""
    cards = [
        Card(
            name,
            count,
            10**9,
            {
                "block": UnitTimes(forward=line(s), backward=line(3 * s)),
                ROOT: UnitTimes(forward=line(0.1), backward=line(0.5)),
            },
            optimizer_s_per_element=s * 1e-3,
        )
        for name, s in (("fast", 1.0), ("slow", 2.0))
    ]
    return profile(cards, calls=("block",) * 2, root_unit=root(500), network=network, overhead=0.25)


def test_a_step_without_network_by_hand():
    plan = plan_even(two_cards(), PlanRequest(global_batch=4))
    fast, slow = plan.prediction.workers
    assert fast.forward_s == pytest.approx(2 * 0.1 + 2 * 2 * 1.0)
    assert slow.backward_s == pytest.approx(2 * 0.5 + 2 * 2 * 6.0)
    assert slow.optimizer_s == pytest.approx(0.5 * 2500 * 2e-3)
    assert plan.prediction.step_s == pytest.approx(0.25 + (0.2 + 8) + (1 + 24) + 2.5)
    assert plan.prediction.exposed_communication_s == 0
    assert plan.prediction.tokens_per_s == pytest.approx(4 * 128 / plan.prediction.step_s)


def test_computing_hides_the_next_gather_but_not_the_first():
    wire = Network(
        gather={"broadcast": curve(1.0, 3.0, sizes=(2000, 4000))},
        reduce={"all_to_all": curve(1.5, 5.0, sizes=(2000, 4000))},
    )
    plan = plan_even(two_cards(wire), PlanRequest(global_batch=2, space=STAGE_3))
    fast, slow = plan.prediction.workers
    # Root 2000 bytes: 1 s to gather, 1.5 s to reduce. Block 4000 bytes: 3 s and 5 s. The root's
    # own code before the first call (0.1 s) runs while a block is gathered; the last one stays for
    # its backward, so the head (0.5 s) runs beside nothing.
    assert fast.forward_s == pytest.approx(3 + max(1, 3) + 1)
    assert slow.forward_s == pytest.approx(3 + max(2, 3) + 2)
    assert fast.backward_s == pytest.approx(0.5 + max(3, 3) + max(3, 5))
    assert slow.backward_s == pytest.approx(0.5 + max(6, 3) + max(6, 5))
    exposed = 1 + 5 + 1.5
    assert plan.prediction.step_s == pytest.approx(0.25 + exposed + 8 + 12.5 + 2.5)
    waited = exposed + (8 - 4.1)
    assert plan.prediction.exposed_communication_s == pytest.approx(waited)


def test_one_rank_alone_communicates_nothing():
    wire = Network(gather={"broadcast": curve(9.0)}, reduce={"all_to_all": curve(9.0)})
    setting = two_cards(wire)
    plan = plan_even(setting, PlanRequest(global_batch=2, devices=("fast-0",)))
    assert plan.prediction.exposed_communication_s == 0


def test_equal_intervals_go_by_native_collectives():
    forms = {"native": curve(1.0, sizes=(4000,)), "list": curve(2.0, sizes=(4000,))}
    named = Collectives(gather="list", reduce="list")
    setting = two_cards(Network(forms, forms, named))
    assert links_of(setting, named, (0.5, 0.5)).gather_s["block"] == 1.0
    assert links_of(setting, named, (0.4, 0.6)).gather_s["block"] == 2.0
    # 1000 elements over three ranks are not equal to the element.
    assert links_of(setting, named, (1 / 3,) * 3).reduce_s["block"] == 2.0


def test_native_collectives_for_unequal_intervals_are_refused():
    native = Collectives(gather="native")
    with raises(InputError, code="native-collective-unequal"):
        links_of(two_cards(), native, (0.4, 0.6))


def test_a_form_that_was_not_measured_is_an_error():
    network = Network({"list": curve(1.0)}, {}, Collectives(gather="broadcast"))
    with raises(InputError, code="collective-not-measured", what="broadcast"):
        plan_even(two_cards(network), PlanRequest(global_batch=2))


def test_a_unit_called_in_succession_is_gathered_and_reduced_once():
    wire = Network(gather={"broadcast": curve(10.0)}, reduce={"all_to_all": curve(10.0)})
    setting = two_cards(wire)
    model = setting.model.model_copy(update={"calls": ("layer", "layer")})
    request = PlanRequest(global_batch=2, space=STAGE_3)
    plan = plan_even(setting.model_copy(update={"model": model}), request)
    fast, _ = plan.prediction.workers
    gather = links_of(setting, Collectives(), (0.5, 0.5)).gather_s["block"]
    assert fast.forward_s == pytest.approx(gather + 1 + 1)
    assert fast.backward_s == pytest.approx(0.5 + 3 + 3)


def test_one_after_the_other_the_smaller_micro_batch_goes_first():
    """3 samples by 2: gathers hide behind the forward of 1, reductions behind the backward of 2."""
    links = CollectiveSeconds(
        build_buckets(two_cards().model, ONE_UNIT_PER_BUCKET),
        gather_s={"block": 4.0},
        regather_s={"block": 0.0},
        reduce_s={"block": 10.0},
    )
    micro, mode = MicroBatches.of([3], [2]), Mode(order="sequential")
    forward, backward = compute_pass_seconds(two_cards(), "fast", links, micro, mode)
    root, first_call, second_call = 0.3 + (4.0 - 0.1), 3.0 + (4.0 - 1.0), 3.0
    smaller = 0.5 + 3.0 + 3.0  # head and backward, before anything is reduced
    assert forward[0] == pytest.approx(root + first_call + second_call + smaller)
    head, second_call, first_call = 1.0, 6.0, max(6.0, 10.0)
    assert backward[0] == pytest.approx(head + second_call + first_call)


def test_a_plan_of_another_model_is_refused():
    setting = two_cards()
    plan = plan_even(setting, PlanRequest(global_batch=2))
    other = setting.model.model_copy(update={"fingerprint": "another"})
    with raises(InputError, code="plan-profile-mismatch", what=("synthetic", "another")):
        predict(setting.model_copy(update={"model": other}), plan)


def test_a_class_without_times_is_refused():
    setting = two_cards()
    plan = plan_even(setting, PlanRequest(global_batch=2))
    with raises(InputError, code="profile-class-missing", what="slow"):
        predict(setting.model_copy(update={"classes": setting.classes[:1]}), plan)


def test_a_frozen_unit_is_gathered_but_not_reduced():
    wire = Network(gather={"broadcast": line(1e-3)}, reduce={"all_to_all": line(1e-3)})
    frozen = block(trainable=0, frozen=4000)
    setting = two_cards(wire)
    model = setting.model.model_copy(update={"kinds": (frozen,)})
    links = links_of(setting.model_copy(update={"model": model}), Collectives(), (0.5, 0.5))
    assert links.gather_s["block"] == pytest.approx(4.0)
    assert links.reduce_s["block"] == 0
