"""What is said to find no room finds none, whatever is tried; and most of it is said."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.step_time import compute_exposed_seconds
from gpumix.planner.common.device_pool import Fleet
from gpumix.planner.common.sharding_setting import (
    ShardingSetting,
    make_setting,
    relax_settings,
)
from gpumix.planner.common.sharding_setting import iterate_settings as settings_of
from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.planner.data_parallel import feasibility
from gpumix.planner.data_parallel.feasibility import FeasibilityTest
from gpumix.schema.job.search_space import EVERYTHING
from helpers.draws import examples
from helpers.plans.brute import best_of, cuts, linked_profiles, small_profiles
from helpers.plans.profiles import Card, block, line, profile, steady

MANY = examples(10)


@MANY
@given(
    st.one_of(small_profiles(), linked_profiles()), st.integers(2, 10), st.sampled_from([2, 128])
)
def test_nothing_fits_where_it_is_said(profile, batch, steps):
    devices = list_devices_by_rank(profile, PlanRequest(global_batch=batch))
    cut = cuts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feasibility, "SAMPLE_COUNTS", steps)
        for setting in settings_of(Fleet.of(profile, devices), EVERYTHING):
            if all(setting.modes[name] for name in setting.classes):
                test, best_s = FeasibilityTest(batch), best_of(setting, batch, cut)
                assert (test.can_fit(setting) and test.can_hold_state(setting)) or best_s == inf


@pytest.mark.parametrize(("batch", "fits"), [(1, True), (90, True), (110, False)])
def test_a_batch_that_is_a_little_too_large_is_told(batch, fits):
    """Each device keeps 1,000 bytes for each sample of four calls, and has room for 50 of them."""
    kinds = [block(trainable=0, kept=line(1_000))]
    cards = [Card("c", 2, 204_082, steady(1.0))]  # 2 % are for the framework's own kernels
    whole = profile(cards, kinds=kinds)
    setting = make_setting(whole, list_devices_by_rank(whole, PlanRequest(global_batch=batch)))
    assert FeasibilityTest(batch).can_fit(setting) == fits


@examples(5)
@given(linked_profiles(), st.integers(2, 6))
def test_no_form_of_collectives_is_faster_than_the_fastest_of_all(profile, batch):
    """Nor has more room."""
    fleet, cut = (
        Fleet.of(profile, list_devices_by_rank(profile, PlanRequest(global_batch=batch))),
        cuts(),
    )
    groups: dict[object, list[ShardingSetting]] = {}
    for setting in settings_of(fleet, EVERYTHING):
        if all(setting.modes[name] for name in setting.classes):
            key = setting.zero_stage, setting.sharding, setting.on_host
            groups.setdefault(key, []).append(setting)
    for alike in groups.values():
        relaxed = relax_settings(alike)
        least_s = compute_exposed_seconds(profile, relaxed.links) + best_of(relaxed, batch, cut)
        for one in alike:
            step_s = compute_exposed_seconds(profile, one.links) + best_of(one, batch, cut)
            assert least_s <= step_s * (1 + 1e-9)
