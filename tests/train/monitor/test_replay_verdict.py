"""Who computes wrong, by what all made of the same batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.monitor.replay_verdict import (
    TOLERANCE,
    explain_no_replay,
    find_deviating_ranks,
    get_tolerance,
    group_comparable_ranks,
)

LAST, FIRST = "block.1", "block.0"  # in the order of backward
GOOD = {LAST: [2.0, 1.0, 0.5], FIRST: [3.0, -2.0, 1.0]}


def off(part: float, *buckets: str) -> dict[str, list[float]]:
    return {
        name: [value * (1 + part) if name in buckets else value for value in values]
        for name, values in GOOD.items()
    }


def test_who_agrees_is_sound():
    assert find_deviating_ranks({0: GOOD, 2: off(1e-6, LAST, FIRST), 3: GOOD}, 1e-3) is None


def test_one_of_three_is_named_with_where_it_begins():
    found = find_deviating_ranks({0: GOOD, 1: off(0.5, FIRST), 2: GOOD}, 1e-3)
    assert (found.ranks, found.where, found.sure) == ((1,), FIRST, True)
    assert 0.2 < found.deviation < 1.0
    assert find_deviating_ranks({0: off(0.5, LAST, FIRST), 1: GOOD, 2: GOOD}, 1e-3).where == LAST


def test_of_two_nobody_knows_who():
    found = find_deviating_ranks({4: GOOD, 7: off(0.5, LAST)}, 1e-3)
    assert (found.ranks, found.sure) == ((4, 7), False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_wrong(value):
    spoilt = GOOD | {FIRST: [value, 1.0, 2.0]}
    found = find_deviating_ranks({0: GOOD, 1: GOOD, 2: spoilt}, 1e-3)
    assert (found.ranks, found.deviation) == ((2,), math.inf)


def test_a_batch_that_has_no_gradient_tells_nothing():
    nothing = {name: [math.nan] * 3 for name in GOOD}
    assert find_deviating_ranks(dict.fromkeys(range(3), nothing), 1e-3) is None
    still = {name: [0.0] * 3 for name in GOOD}
    assert find_deviating_ranks(dict.fromkeys(range(3), still), 1e-3) is None


def test_one_alone_tells_nothing():
    assert find_deviating_ranks({0: GOOD}, 1e-3) is None


@given(
    ranks=st.integers(3, 9),
    data=st.data(),
    part=st.floats(0.01, 1e6),
    noise=st.floats(0, 1e-5),
)
def test_fewer_than_half_are_found(ranks, data, part, noise):
    few = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=(ranks - 1) // 2))
    prints = {
        rank: off(part * (1 + n), FIRST) if rank in few else off(noise, LAST, FIRST)
        for n, rank in enumerate(range(ranks))
    }
    found = find_deviating_ranks(prints, 1e-3)
    assert set(found.ranks) == few
    assert found.sure


def stage(**samples: int) -> Stage:
    """Of devices with so many samples each."""
    workers = tuple(
        Worker(device=name, device_class="c", samples=n, micro_batch=n, state_share=0.5)
        for name, n in samples.items()
    )
    return Stage(units=("unit",), workers=workers)


def tp_group(**samples: int) -> Stage:
    """Of two devices in each."""
    return stage(**samples).model_copy(update={"tensor": 2})


@pytest.mark.parametrize(
    ("stages", "groups", "why"),
    [
        ((stage(a=1, b=1),), [[0, 1]], ""),
        ((stage(a=1, b=0, c=3),), [[0, 2]], ""),
        ((stage(a=0, b=2),), [], "one device alone computes"),
        ((stage(a=2), stage(b=1, c=1)), [[1, 2]], ""),
        ((stage(a=1, b=1), stage(c=1, d=1)), [[0, 1], [2, 3]], ""),
        ((stage(a=2), stage(b=2)), [], "no two devices compute the same stage"),
        ((stage(a=1, b=1), stage(c=2), stage(a=1, b=1)), [[0, 1]], ""),
        ((tp_group(a=1, b=1, c=1, d=1),), [[0, 2], [1, 3]], ""),
        ((tp_group(a=2, b=2),), [], "no two devices compute the same parts of units"),
        ((tp_group(a=2, b=2), stage(c=1, d=1)), [[2, 3]], ""),
    ],
)
def test_which_devices_of_a_plan_are_compared(stages, groups, why):
    one = Plan(
        strategy="by hand",
        model="m",
        sequence_length=8,
        global_batch=2,
        stages=(stage(a=1, b=1),),
    )
    plan = one.model_copy(update={"stages": stages})
    assert group_comparable_ranks(plan) == groups
    assert explain_no_replay(plan) == why


def test_the_coarsest_dtype_says_what_is_tolerated():
    worker = Worker(device="a", device_class="c", samples=1, micro_batch=1, state_share=0.5)
    half = worker.model_copy(update={"compute_dtype": "bf16"})
    tf32 = worker.efficiency.model_copy(update={"tf32": True})
    assert get_tolerance([worker]) == TOLERANCE["fp32"]
    assert get_tolerance([worker, half]) == TOLERANCE["bf16"]
    assert get_tolerance([worker.model_copy(update={"efficiency": tf32})]) == TOLERANCE["tf32"]
