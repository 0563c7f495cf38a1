"""Any plan trains like one process: the engine's main promise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from models import ARCHITECTURES
from reference import Share, random_shares, train_alone, train_by_plan, worst_error
from strategies import share_lists

STEPS = 3
TOLERANCE = 2e-5


def assert_parity(name: str, shares: list[Share]) -> None:
    trained = train_by_plan(name, shares, STEPS)
    size = sum(share.samples for share in shares)
    assert worst_error(trained, train_alone(ARCHITECTURES[name], size, STEPS)) < TOLERANCE
    assert all(counts == trained.expected_counts for counts in trained.counts)


@pytest.mark.parametrize("name", ["gpt2", "bart", "plain-own-blocks"])
@given(shares=share_lists())
@settings(max_examples=5)
def test_any_plan_trains_like_one_process(name, shares):
    assert_parity(name, shares)


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param([Share(3, 2, 1), Share(0, 0, 1)], id="a rank without samples"),
        pytest.param([Share(3, 2, 1), Share(2, 1, 0)], id="a rank without state"),
        pytest.param([Share(0, 0, 0), Share(3, 2, 1), Share(0, 0, 0)], id="idle ranks"),
        pytest.param([Share(4, 1, 0), Share(0, 0, 1)], id="one computes and one stores"),
        pytest.param([Share(1, 1, 1), Share(1, 1, 1), Share(1, 1, 1)], id="even"),
    ],
)
def test_ranks_may_lack_samples_or_state(shares):
    assert_parity("gpt2", shares)


@pytest.mark.slow
def test_all_architectures_train_like_one_process():
    rng = random.Random(1)
    for name in ARCHITECTURES:
        for world in (1, 3):
            assert_parity(name, random_shares(world, rng))
