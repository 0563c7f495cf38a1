"""A better cluster never gets a slower answer from the default search, stages included."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_never_beaten import BEATEN, cluster

from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.optimal import plan_fastest
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.profile.profile import Profile
from helpers.draws import examples
from helpers.extended import every_second
from helpers.plans.profiles import GIB, MIB

Cards = list[tuple[float, int]]


def step_s(found: Profile, batch: int) -> float:
    """Of the default plan, which may leave devices out; infinite where nothing fits."""
    request = PlanRequest(global_batch=batch, space=EVERYTHING.leaving_out())
    try:
        return get_prediction(plan_fastest(found, request)).step_s
    except (InputError, NoFeasiblePlanError):
        return float("inf")


CARDS = st.lists(
    st.tuples(st.sampled_from([1e-3, 1.3e-3, 2.6e-3]), st.integers(1, 2)), min_size=1, max_size=2
)
LINKS = st.sampled_from([3e7, 3e8, 3e9])
MEMORY = st.sampled_from([48 * MIB, 96 * MIB, GIB])
BATCHES = st.sampled_from([3, 8, 16])


@pytest.mark.slow
@examples(3)
@given(cards=CARDS, link=LINKS, memory=MEMORY, batch=BATCHES)
def test_a_faster_link_never_makes_the_step_longer(cards, link, memory, batch):
    slow, fast = (cluster(cards, link=link * n, memory=memory) for n in (1, 4))
    assert step_s(fast, batch) <= BEATEN * step_s(slow, batch)


@pytest.mark.slow
@examples(3)
@given(cards=CARDS, link=LINKS, memory=MEMORY, batch=BATCHES)
def test_more_memory_never_makes_the_step_longer(cards, link, memory, batch):
    small, large = (cluster(cards, link=link, memory=memory * n) for n in (1, 2))
    assert step_s(large, batch) <= BEATEN * step_s(small, batch)


@pytest.mark.slow
@examples(3)
@given(cards=CARDS, link=LINKS, memory=MEMORY, batch=BATCHES)
def test_a_faster_device_never_makes_the_step_longer(cards, link, memory, batch):
    (seconds, count), *others = cards
    before, after = (
        cluster([(seconds * n, count), *others], link=link, memory=memory) for n in (1, 0.7)
    )
    assert step_s(after, batch) <= BEATEN * step_s(before, batch)


@pytest.mark.slow
@examples(3)
@given(cards=CARDS, link=LINKS, memory=MEMORY, batch=BATCHES)
def test_a_device_more_never_makes_the_step_longer(cards, link, memory, batch):
    assert_a_device_more_is_no_slower(cards, link, memory, batch)


def test_a_slow_device_more_may_be_left_out_of_stages():
    """With it in a stage the step took 3% longer."""
    assert_a_device_more_is_no_slower([(5e-3, 2), (1.3e-3, 3)], 3e8, 96 * MIB, 16)


# -- clusters whose plans are in waves -------------------------------------------------------------

# Cards, link, memory and batch: what calls keep for the backward has no room for all samples.
IN_WAVES = [
    ([(1e-3, 2)], 3e9, 72 * MIB, 24),
    ([(1e-3, 2)], 1e10, 72 * MIB, 64),
    ([(1e-3, 2), (2.6e-3, 2)], 3e9, 56 * MIB, 24),
    ([(1e-3, 1), (1.3e-3, 2)], 1e10, 56 * MIB, 24),
]
KEPT = 5e5


def better(cards: Cards, link: float, memory: int) -> dict[str, Profile]:
    (seconds, count), *others = cards
    return {
        "a faster link": cluster(cards, link=4 * link, memory=memory, kept=KEPT),
        "a little more memory": cluster(cards, link=link, memory=memory + 4 * MIB, kept=KEPT),
        "more memory": cluster(cards, link=link, memory=memory * 3 // 2, kept=KEPT),
        "a faster device": cluster(
            [(0.7 * seconds, count), *others], link=link, memory=memory, kept=KEPT
        ),
        "a device more": cluster(
            [(seconds, count + 1), *others], link=link, memory=memory, kept=KEPT
        ),
    }


@pytest.mark.parametrize(("cards", "link", "memory", "batch"), every_second(IN_WAVES))
def test_a_better_cluster_is_never_slower_than_a_plan_in_waves(cards, link, memory, batch):
    now = cluster(cards, link=link, memory=memory, kept=KEPT)
    request = PlanRequest(global_batch=batch, space=EVERYTHING.leaving_out())
    plan = plan_fastest(now, request)
    assert plan.waves > 1 and len(plan.stages) == 1
    for what, found in better(cards, link, memory).items():
        assert step_s(found, batch) <= BEATEN * get_prediction(plan).step_s, what


@pytest.mark.slow
@pytest.mark.extended
@examples(3)
@given(
    cards=CARDS,
    link=st.sampled_from([3e8, 3e9, 1e10]),
    memory=st.integers(50, 100),
    batch=st.integers(8, 64),
)
def test_no_better_cluster_is_slower_where_calls_keep_much(cards, link, memory, batch):
    before = step_s(cluster(cards, link=link, memory=memory * MIB, kept=KEPT), batch)
    for what, found in better(cards, link, memory * MIB).items():
        assert step_s(found, batch) <= BEATEN * before, what


def assert_a_device_more_is_no_slower(cards: Cards, link: float, memory: int, batch: int) -> None:
    (seconds, count), *others = cards
    before, after = (
        cluster([(seconds, count + more), *others], link=link, memory=memory) for more in (0, 1)
    )
    assert step_s(after, batch) <= BEATEN * step_s(before, batch)
