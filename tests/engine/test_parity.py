"""Any plan trains like one process: the engine's main promise."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from commands import run
from extended import left_out
from gpumix.schema.plan.plan import Collectives
from models import ARCHITECTURES
from reference import (
    Share,
    Trained,
    random_shares,
    train_alone,
    train_by_plan,
    train_by_plans,
    worst_error,
)
from strategies import share_lists

STEPS = 2
TOLERANCE = 2e-5


def assert_parity(name: str, shares: list[Share]) -> None:
    assert_same(name, shares, train_by_plan(name, shares, STEPS))


def assert_same(name: str, shares: list[Share], trained: Trained) -> None:
    size = sum(share.samples for share in shares)
    assert worst_error(trained, train_alone(ARCHITECTURES[name], size, STEPS)) < TOLERANCE
    assert all(counts == trained.expected_counts for counts in trained.counts)


@pytest.mark.parametrize("name", left_out(["gpt2", "bart", "plain-own-blocks"], ["gpt2"]))
@given(shares=share_lists())
@settings(max_examples=4)
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
    """On several ranks; some alone too."""
    rng = random.Random(1)
    cases = {
        (name, world): (name, random_shares(world, rng), {})
        for number, name in enumerate(ARCHITECTURES)
        for world in ((1, 3) if number % 5 == 0 else (3,))
    }
    found = train_by_plans(cases, STEPS)
    for key, (name, shares, _) in cases.items():
        assert_same(name, shares, found[key])


@pytest.mark.slow
def test_the_benchmark_tells_its_figures():
    script = Path(__file__).parents[2] / "benchmarks" / "parity.py"
    command = [sys.executable, str(script), "--json", "--only", "gpt2", "--steps", "1"]
    done = run(command, folder=script.parent, env=os.environ, timeout_s=120)
    assert done.code == 0, done.err
    figures = json.loads(done.out.splitlines()[-1])
    assert figures["architectures"] == 1
    assert figures["plans"] == 7
    assert figures["worst_relative_error"] < TOLERANCE
    assert figures["wrong_collectives"] == 0


def test_padded_collectives_train_like_one_process():
    """Shares that differ little, and one buffer that no three ranks can share equally."""
    forms = Collectives(gather="padded", reduce="padded", padding=1.1)
    shares = [Share(3, 2, 10), Share(1, 1, 10), Share(2, 1, 9)]
    trained = train_by_plan("gpt2", shares, STEPS, collectives=forms)
    assert worst_error(trained, train_alone(ARCHITECTURES["gpt2"], 6, STEPS)) < TOLERANCE
    assert all(counts == trained.expected_counts for counts in trained.counts)
