"""Hosts without the memory to read weights: no plan is made for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumix.cost.loading_memory import compute_loading_bytes, find_room_on_host
from gpumix.planner.cluster_change import forecast_clusters
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.compare import compare
from gpumix.planner.plan import plan
from gpumix.schema.errors import LoadingMemoryError
from helpers.errors import raises
from helpers.plans.profiles import Card, block, profile, steady

CARDS = Card("card", 2, 10**9, steady(1.0))
LOADING = 4 * 5000  # fp32 values of a block
BATCH = 8


def with_host_bytes(host_bytes):
    found = profile([replace(CARDS)], kinds=[block(trainable=5000)])
    assert compute_loading_bytes(found.model) == LOADING
    (of_class,) = found.classes
    return found.model_copy(
        update={"classes": (of_class.model_copy(update={"host_bytes": host_bytes}),)}
    )


@pytest.mark.parametrize("strategy", ["optimal", "even", "poplar", "cephalo"])
def test_a_host_with_less_than_reading_takes_has_no_plan(strategy):
    with raises(LoadingMemoryError, code="loading-memory-short", what=2):
        plan(with_host_bytes(LOADING - 1), BATCH, strategy=strategy)
    for enough in (LOADING, None):
        assert plan(with_host_bytes(enough), BATCH, strategy=strategy).prediction is not None


def test_nor_has_it_one_in_a_comparison():
    with pytest.raises(LoadingMemoryError):
        compare(with_host_bytes(LOADING - 1), PlanRequest(global_batch=BATCH))


def test_what_reading_takes_is_no_room_for_what_is_kept():
    assert find_room_on_host(with_host_bytes(LOADING + 7), "card") == 7
    assert find_room_on_host(with_host_bytes(LOADING - 7), "card") == 0
    assert find_room_on_host(with_host_bytes(None), "card") is None


def test_a_forecast_says_what_is_short():
    variants = [("now", with_host_bytes(LOADING - 1)), ("more RAM", with_host_bytes(LOADING))]
    now, more = forecast_clusters(variants, PlanRequest(global_batch=BATCH))
    assert now.step_s is None and "while weights load" in now.why
    assert more.step_s is not None
