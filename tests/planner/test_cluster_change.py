"""What a change is worth is what planning on the changed cluster says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import make_decoder
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.cluster_change import forecast_clusters
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import small_profiles
from helpers.plans.profiles import GIB, Card, profile, steady

SIZES = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 8, "intermediate_size": 2816, "vocab_size": 4000}  # fmt: skip
EASY = examples(4)


def cards(fast=1, slow=1, memory=GIB):
    """Two classes; a slow device takes three times as long."""
    made = [("fast", fast, steady(1.0)), ("slow", slow, steady(3.0))]
    return profile([Card(name, count, memory, times) for name, count, times in made if count])


def asked(*variants, batch=8, prices=None):
    named = [(f"change {i}", variant) for i, variant in enumerate(variants)]
    return forecast_clusters(named, PlanRequest(global_batch=batch), prices)


@EASY
@given(small_profiles(), small_profiles(), st.integers(1, 8))
def test_each_is_the_plan_that_is_made_for_its_cluster(one, other, batch):
    request = PlanRequest(global_batch=batch)
    found = forecast_clusters([("now", one), ("then", other)], request)
    for outlook, variant in zip(found, (one, other)):
        counts = {c.name: len(variant.cluster.members(c.name)) for c in variant.cluster.classes}
        assert outlook.devices == counts
        try:
            expected = STRATEGIES["optimal"](variant, request).prediction
        except NoFeasiblePlanError as error:
            assert (outlook.step_s, outlook.why) == (None, error.what)
        else:
            assert outlook.step_s == expected.step_s
            assert outlook.tokens_per_s == expected.tokens_per_s
    now, then = found
    assert now.worth is None
    steps = (now.step_s, then.step_s)
    if all(steps):
        assert then.worth == pytest.approx(steps[0] / steps[1] - 1)


def test_what_is_faster_in_stages_counts_in_stages():
    """Two hosts over a slow link: stages are what is planned for them, today and with a better
    one."""
    shape = make_decoder(SIZES)
    now, then = (
        estimate_profile(
            lambda dtype: shape.model(256, dtype, "small"),
            parse_cluster("2 hosts of 1x rtx3090", network=link),
            sequence_length=256,
        )
        for link in ("1GbE", "2.5GbE")
    )
    space = Space(
        gradient_checkpointing=False,
        cross_entropy="whole",
        pipeline_schedules="1f1b",
        leave_out=False,
    )
    request = PlanRequest(global_batch=16, space=space)
    found = forecast_clusters([("now", now), ("then", then)], request)
    planned = [plan_staged(variant, request).prediction.step_s for variant in (now, then)]
    assert [outlook.step_s for outlook in found] == pytest.approx(planned)
    assert planned[0] < plan_one_stage(now, request).prediction.step_s


def test_a_device_more_and_one_less():
    now, more, less = asked(cards(), cards(fast=2), cards(slow=0))
    assert (now.step_s, more.step_s, less.step_s) == pytest.approx((96, 64, 128))
    assert (more.worth, less.worth) == pytest.approx((0.5, -0.25))
    assert now.devices == {"fast": 1, "slow": 1}
    assert less.devices == {"fast": 1}


def test_all_devices_are_paid_for():
    prices = {"fast": 2.0, "slow": 0.5}
    now, more = asked(cards(), cards(slow=3), prices=prices)
    assert (now.price_per_hour, more.price_per_hour) == (2.5, 3.5)
    for outlook in (now, more):
        seconds = 1e9 / outlook.tokens_per_s
        expected = outlook.price_per_hour * seconds / 3600
        assert outlook.price_per_billion_tokens == pytest.approx(expected)


def test_without_prices_nothing_is_said_of_them():
    (now,) = asked(cards())
    assert now.price_per_hour is None
    assert now.price_per_billion_tokens is None


def test_a_class_without_a_price_is_named():
    with raises(InputError, code="price-missing", what="slow") as caught:
        asked(cards(), prices={"fast": 1.0})
    assert "--price slow=" in caught.value.fix


def test_what_does_not_fit_is_a_row_with_its_reason():
    small = profile([Card("tiny", 1, 2_000, steady(1.0))])
    _, then = asked(cards(), small, prices={"fast": 1, "slow": 1, "tiny": 0.1})
    assert then.step_s is then.worth is then.price_per_billion_tokens is None
    assert "short of" in then.why
    assert then.price_per_hour == 0.1
    first, second = asked(small, cards())
    assert second.worth is None
    assert first.step_s is None


def test_devices_that_compute_nothing_are_named():
    (few,) = asked(cards(fast=2, slow=3), batch=2)
    assert few.why == "without samples: 3 of 3 slow"
    (some,) = asked(cards(fast=3, slow=0), batch=2)
    assert some.why == "without samples: 1 of 3 fast"
    (none,) = asked(cards())
    assert none.why == ""


def test_a_step_that_takes_no_time_has_no_worth_to_compare_with():
    free = profile([Card("c", 1, GIB, steady(0.0))])
    now, then = asked(free, cards())
    assert now.tokens_per_s == float("inf")
    assert then.worth is None


def test_what_is_emulated_or_estimated_is_marked():
    measured = cards()
    (fast, slow), there = measured.classes, measured.cluster
    estimated = measured.model_copy(
        update={"classes": (fast, slow.model_copy(update={"estimated": True}))}
    )
    classes = tuple(c.model_copy(update={"emulate_flops_per_s": 1e9}) for c in there.classes)
    emulated = measured.model_copy(
        update={"cluster": there.model_copy(update={"classes": classes})}
    )
    found = asked(measured, estimated, emulated)
    assert [o.estimated for o in found] == [(), ("slow",), ()]
    assert [o.emulated for o in found] == [False, False, True]
