"""The optimal plan against exhaustive search, and the laws that it must obey."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.planner.common import device_pool
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.data_parallel import class_options
from gpumix.planner.data_parallel import search as module
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.profile.profile import ROOT, UnitTimes
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import best_step, cuts, linked_profiles, small_profiles, step_of
from helpers.plans.profiles import GIB, Card, Network, block, curve, line, profile, steady

about = partial(pytest.approx, rel=1e-9, abs=1e-15)
MANY = examples(12)


@MANY
@given(small_profiles(), st.integers(1, 4))
def test_no_plan_is_faster(profile, batch):
    expected, found = best_step(profile, batch), step_of(profile, batch)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found == about(expected)


@examples(4)
@given(linked_profiles(), st.integers(1, 3))
def test_no_plan_on_some_devices_is_faster_where_links_are_stated(profile, batch):
    assert step_of(profile, batch) == best_of_some(profile, batch, lambda some: True)


@pytest.mark.extended
@examples(6)
@given(linked_profiles(), st.integers(1, 3))
def test_in_large_clusters_some_classes_and_hosts_are_left_out(profile, batch):
    def whole(some):
        """Whether all devices of these classes on these hosts are there."""
        classes, hosts = {d.device_class for d in some}, {d.host for d in some}
        every = profile.cluster.devices
        return len(some) == sum(d.device_class in classes and d.host in hosts for d in every)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_pool, "MOST_FLEETS", 0)
        assert step_of(profile, batch) == best_of_some(profile, batch, whole)


def best_of_some(profile, batch, may):
    """The least step on any devices that `may` be all there are."""
    steps, cut = [], cuts()
    for some in filter(may, subsets(profile.cluster.devices)):
        cluster = profile.cluster.model_copy(update={"devices": tuple(some)})
        steps.append(best_step(profile.model_copy(update={"cluster": cluster}), batch, cut=cut))
    expected = min((s for s in steps if s is not None), default=None)
    return expected and about(expected)


def subsets(devices):
    """Of those that differ only in which of alike devices of a host they have, one."""
    every = (some for n in range(1, len(devices) + 1) for some in combinations(devices, n))
    return {tuple((d.host, d.device_class) for d in some): some for some in every}.values()


@examples(4)
@given(small_profiles(), st.integers(2, 8))
def test_a_rough_answer_first_changes_nothing(profile, batch):
    expected = step_of(profile, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW_CELLS", 1)
        patch.setattr(module, "FEW_SIZES", 2)
        patch.setattr(class_options, "FEW_SIZES", 2)
        patch.setattr(class_options, "MIN_OPTIONS_TO_THIN", 0)
        assert step_of(profile, batch) == (expected and pytest.approx(expected, rel=1e-9))


@examples(8)
@given(st.lists(st.lists(st.floats(0.1, 3.0), min_size=7, max_size=7), min_size=2, max_size=3))
def test_a_batch_of_a_thousand_is_split_as_trying_all_splits_does(rises):
    """Without network and with memory enough only the times of whole devices count."""
    batch, sizes = 1000, [1, 2, 4, 8, 16, 32, 64]
    times = [np.cumsum(steps) for steps in rises]
    cards = [
        Card(f"c{n}", 1, 2**40, both_passes(curve(*t, sizes=sizes), curve(*(2 * t), sizes=sizes)),
             largest=64)
        for n, t in enumerate(times)
    ]  # fmt: skip
    plan = plan_one_stage(profile(cards), PlanRequest(global_batch=batch))
    alone = [4 * 3 * least_seconds(t, sizes, batch) for t in times]
    together = alone[0]
    for more in alone[1:]:  # the least maximum over all ways to share n samples
        together = np.asarray(
            [np.maximum(together[: n + 1], more[n::-1]).min() for n in range(batch + 1)]
        )
    assert get_prediction(plan).step_s == about(together[batch])


def both_passes(forward, backward):
    free = line(0.0)
    return {
        "block": UnitTimes(forward=forward, backward=backward),
        ROOT: UnitTimes(forward=free, backward=free),
    }


def least_seconds(times, sizes, batch):
    """Of 0, 1, ... samples in the best micro-batches of one size, the last one smaller."""
    of = np.concatenate(([0.0], np.interp(np.arange(1, 65), sizes, times)))
    ways = [[n // m * of[m] + of[n % m] for m in range(1, 65)] for n in range(batch + 1)]
    return np.min(ways, axis=1)


def test_a_fast_card_gets_more_samples_and_an_equal_share():
    cards = [Card("fast", 1, GIB, steady(1.0)), Card("slow", 1, GIB, steady(3.0))]
    plan = plan_one_stage(profile(cards), PlanRequest(global_batch=8))
    assert [w.samples for w in plan.workers] == [6, 2]
    assert [w.state_share for w in plan.workers] == [0.5, 0.5]


def test_a_card_without_room_computes_but_stores_little():
    """The fast card has hardly any memory: the slow one keeps nearly all of the state."""
    cards = [Card("big", 1, 10**8, steady(3.0)), Card("small", 1, 300_000, steady(1.0))]
    kinds = [block(trainable=10_000)]
    plan = plan_one_stage(profile(cards, kinds=kinds), PlanRequest(global_batch=8))
    big, small = plan.workers
    assert (big.samples, small.samples) == (2, 6)
    assert 0.5 < big.state_share < 1


def test_a_card_without_memory_for_samples_only_stores():
    kinds = [block(trainable=100, kept=line(2_000))]
    cards = [Card("fast", 1, 60_000, steady(1.0)), Card("slow", 1, 9_000, steady(1.5))]
    plan = plan_one_stage(profile(cards, kinds=kinds), PlanRequest(global_batch=4))
    assert [(w.samples, w.micro_batch) for w in plan.workers] == [(4, 1), (0, 0)]
    assert plan.workers[1].state_share > 0


def test_fewer_samples_than_devices_is_fine():
    plan = plan_one_stage(profile([Card("c", 3, GIB, steady(1.0))]), PlanRequest(global_batch=2))
    assert [w.samples for w in plan.workers] == [1, 1, 0]


def test_state_follows_the_speed_of_the_update():
    cards = [
        Card("quick", 1, GIB, steady(1.0), optimizer_s_per_element=1e-3),
        Card("tardy", 1, GIB, steady(1.0), optimizer_s_per_element=3e-3),
    ]
    plan = plan_one_stage(profile(cards), PlanRequest(global_batch=2))
    assert [w.state_share for w in plan.workers] == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(("unequal_s", "equal"), [(1.05, False), (3.0, True)])
def test_equal_shares_are_chosen_when_native_collectives_pay(unequal_s, equal):
    cards = [
        Card("quick", 1, GIB, steady(1e-3), optimizer_s_per_element=1e-3),
        Card("tardy", 1, GIB, steady(1e-3), optimizer_s_per_element=3e-3),
    ]
    forms = {"native": curve(1.0, sizes=(4000,)), "list": curve(unequal_s, sizes=(4000,))}
    network = Network(forms, forms, Collectives(gather="list", reduce="list"))
    plan = plan_one_stage(profile(cards, network=network), PlanRequest(global_batch=2))
    assert (plan.workers[0].state_share == 0.5) == equal


def test_where_the_network_hides_computing_the_samples_still_balance():
    wire = Network(gather={"broadcast": curve(1e6)}, reduce={"all_to_all": curve(1e6)})
    cards = [Card("fast", 1, GIB, steady(1.0)), Card("slow", 1, GIB, steady(3.0))]
    plan = plan_one_stage(profile(cards, network=wire), PlanRequest(global_batch=8))
    assert [w.samples for w in plan.workers] == [6, 2]


def test_a_micro_batch_that_was_not_measured_is_not_planned():
    card = Card("c", 1, GIB, steady(1.0, start=1.0), largest=3)
    plan = plan_one_stage(profile([card]), PlanRequest(global_batch=8))
    assert plan.workers[0].micro_batch == 3


def test_an_unknown_device_is_refused():
    setting = profile([Card("c", 1, GIB, steady(1.0))])
    with raises(InputError, code="device-not-in-profile", what="gone"):
        plan_one_stage(setting, PlanRequest(global_batch=4, devices=("gone",)))
