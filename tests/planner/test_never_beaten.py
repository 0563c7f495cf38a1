"""The default search: no strategy, and no random search with a budget, finds a faster plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.compare import compare
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.cluster.network import Link, Network
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.profile.profile import Profile
from helpers.draws import examples
from helpers.plans.climb import Climb
from helpers.plans.climb_one_stage import OneStageClimb
from helpers.plans.profiles import GIB, MIB, Card, block, in_a_row, line, profile, steady

BEATEN = 1.001  # times as long as another plan


def cluster(
    cards: list[tuple[float, int]], *, link: float, memory: int = GIB, calls: int = 6
) -> Profile:
    """Cards by seconds of a sample and their number, two on a host."""
    found = profile(
        [Card(f"c{n}", count, memory, steady(s), per_host=2) for n, (s, count) in enumerate(cards)],
        calls=("block",) * calls,
        kinds=[
            block(
                trainable=1_000_000,
                kept=line(1e5),
                gradient=line(1e5),
                forward=line(1e5),
                backward=line(1e6),
            )
        ],
        links=Network(inside=Link.stated(10e9, 1e-5), between=Link.stated(link, 1e-5)),
    )
    return in_a_row(found, message=line(1e5))


def step_s(strategy: str, found: Profile, batch: int) -> float:
    try:
        return get_prediction(STRATEGIES[strategy](found, PlanRequest(global_batch=batch))).step_s
    except (InputError, NoFeasiblePlanError):
        return float("inf")


clusters = st.builds(
    cluster,
    st.lists(
        st.tuples(st.sampled_from([1e-3, 1.3e-3, 2.6e-3]), st.integers(1, 2)),
        min_size=2,
        max_size=2,
    ),
    link=st.sampled_from([3e7, 3e8, 3e9]),
    memory=st.sampled_from([48 * MIB, 96 * MIB, GIB]),
)


@pytest.mark.slow
@examples(3)
@given(found=clusters, batch=st.sampled_from([3, 8, 16]))
def test_no_strategy_is_faster_than_the_default(found, batch):
    ours = step_s("optimal", found, batch)
    for strategy in STRATEGIES:
        assert ours <= BEATEN * step_s(strategy, found, batch), strategy


@pytest.mark.extended
@pytest.mark.slow
@examples(2)
@given(found=clusters, batch=st.sampled_from([3, 8, 16]), seed=st.integers(0, 99))
def test_no_climb_is_faster_than_the_default(found, batch, seed):
    """From its own plan, from random ones of several stages, and from the best of one stage."""
    assert_not_beaten(found, batch, seed, budget=200)


@pytest.mark.parametrize(
    ("cards", "link", "memory", "batch"),
    [
        ([(1e-3, 2), (2.6e-3, 2)], 3e7, GIB, 8),
        ([(1e-3, 2), (1.3e-3, 1)], 3e9, 48 * MIB, 16),
    ],
)
def test_no_short_climb_is_faster_than_the_default(cards, link, memory, batch):
    assert_not_beaten(cluster(cards, link=link, memory=memory), batch, seed=1, budget=60)


@pytest.mark.parametrize(
    ("hosts", "size", "batch", "budget"),
    [
        (
            "2x rtx4090; 4x rtx3090",
            3e9,
            3,
            120,
        ),  # estimates take all replays
        ("4x rtx3090, 1x v100-16gb-pcie", 7e9, 64, 60),  # kept graphs change who is fast
    ],
)
def test_no_short_climb_is_faster_on_real_cards(hosts, size, batch, budget):
    shape = make_llama_like(size)
    found = estimate_profile(
        lambda dtype: shape.model(1024, dtype, "llama"),
        parse_cluster(hosts, "auto", "ib-hdr" if ";" in hosts else None),
        sequence_length=1024,
        parts_in=lambda dtype: shape.parts(1024, dtype, "llama"),
    )
    assert_not_beaten(found, batch, seed=1, budget=budget)


def test_samples_that_follow_kept_graphs_stay_within_measured_sizes():
    shape = make_llama_like(7e9)
    found = estimate_profile(
        lambda dtype: shape.model(1024, dtype, "llama"),
        parse_cluster("4x rtx3090, 1x v100-16gb-pcie", "auto", None),
        sequence_length=1024,
    )
    most = {"rtx3090": 12}
    classes = [
        one.model_copy(update={"largest_micro_batch": most.get(one.device_class)})
        for one in found.classes
    ]
    found = found.model_copy(update={"classes": tuple(classes)})
    plan = plan_fastest(found, PlanRequest(global_batch=64))
    assert len(plan.workers) == 5 and any(w.kept_graphs for w in plan.workers)
    assert all(w.micro_batch <= most.get(w.device_class, 64) for w in plan.workers)


def assert_not_beaten(found: Profile, batch: int, seed: int, *, budget: int) -> None:
    request = PlanRequest(global_batch=batch)
    try:
        plan = plan_fastest(found, request)
    except NoFeasiblePlanError:
        assert Climb(found, request, budget=budget, seed=seed).run() == float("inf")
        return
    ours = get_prediction(plan).step_s
    assert ours <= BEATEN * Climb(found, request, budget=budget, seed=seed, starts=[plan]).run()
    if step_s("best-subset", found, batch) < float("inf"):
        within = request.model_copy(update={"space": request.space.in_one_stage()})
        first = plan_fastest(found, within)
        assert ours <= BEATEN * OneStageClimb(found, request, first, budget=budget, seed=seed).run()


@pytest.mark.extended
def test_a_climb_finds_what_the_default_does_where_stages_pay():
    """Else it could beat nobody."""
    found, request = cluster([(1e-3, 2), (2.6e-3, 2)], link=3e7), PlanRequest(global_batch=16)
    plan = plan_fastest(found, request)
    assert len(plan.stages) > 1
    best_s = min(Climb(found, request, budget=400, seed=seed).run() for seed in range(2))
    assert best_s <= 1.1 * get_prediction(plan).step_s


@pytest.mark.parametrize(
    ("cards", "size", "batch"),
    [
        ("2x rtx4090, 4x rtx3090", 7e9, 128),  # at once, 3090s have no room for their state
        ("1x rtx4090, 2x rtx3090, 1x rtx4060-ti-16gb", 3e9, 64),
    ],
)
def test_no_trainer_that_accumulates_is_faster(cards, size, batch):
    """Trainers take a batch in as many passes as they like, each with collectives of its own."""
    shape = make_llama_like(size)
    found = estimate_profile(
        lambda dtype: shape.model(2048, dtype, "llama"),
        parse_cluster(cards),
        sequence_length=2048,
    )
    compared = compare(found, PlanRequest(global_batch=batch))
    assert compared.best == "optimal"
    assert any("passes of" in row.why for row in compared.rows)
