"""Any plan trains like one process: the engine's main promise."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from gpumix.schema.plan.plan import Collectives
from helpers.extended import left_out
from helpers.plans.drawn_values import share_lists
from helpers.processes.commands import run
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    Share,
    Trained,
    random_shares,
    train_alone,
    train_by_plan,
    train_by_plans,
    worst_error,
)

STEPS = 2
TOLERANCE = 2e-5


def assert_parity(name: str, shares: list[Share]) -> None:
    assert_same(name, shares, train_by_plan(name, shares, STEPS))


def assert_same(name: str, shares: list[Share], trained: Trained) -> None:
    size = sum(share.samples for share in shares)
    assert worst_error(trained, train_alone(ARCHITECTURES[name], size, STEPS)) < TOLERANCE
    assert all(counts == trained.expected_counts for counts in trained.counts)


@pytest.mark.parametrize("name", left_out(["gpt2", "bart", "plain-own-blocks"], ["gpt2", "bart"]))
@given(shares=share_lists())
@settings(max_examples=3)
def test_any_plan_trains_like_one_process(name, shares):
    assert_parity(name, shares)


# Shares that differ little, and one buffer that no three ranks can share equally.
PADDED = Collectives(gather="padded", reduce="padded", padding=1.1)
OF_GPT2: dict[str, tuple[list[Share], dict[str, Any]]] = {
    "a rank without samples": ([Share(3, 2, 1), Share(0, 0, 1)], {}),
    "a rank without state": ([Share(3, 2, 1), Share(2, 1, 0)], {}),
    "idle ranks": ([Share(0, 0, 0), Share(3, 2, 1), Share(0, 0, 0)], {}),
    "one computes and one stores": ([Share(4, 1, 0), Share(0, 0, 1)], {}),
    "even": ([Share(1, 1, 1), Share(1, 1, 1), Share(1, 1, 1)], {}),
    "padded": ([Share(3, 2, 10), Share(1, 1, 10), Share(2, 1, 9)], {"collectives": PADDED}),
}


@pytest.fixture(scope="module")
def of_gpt2():
    cases = {case: ("gpt2", shares, more) for case, (shares, more) in OF_GPT2.items()}
    return train_by_plans(cases, STEPS)


@pytest.mark.parametrize("case", OF_GPT2)
def test_ranks_may_lack_samples_or_state(case, of_gpt2):
    shares, _ = OF_GPT2[case]
    assert_same("gpt2", shares, of_gpt2[case])


# With experts, and with an encoder.
FEW = ("mixtral", "whisper")
OTHERS = tuple(name for name in ARCHITECTURES if name not in FEW)


@pytest.mark.slow
@pytest.mark.parametrize("names", left_out([(FEW,), (OTHERS,)], [(OTHERS,)]), ids=["few", "others"])
def test_architectures_train_like_one_process(names):
    """On several ranks; some alone too."""
    rng = random.Random(1)
    every = {
        (name, world): (name, random_shares(world, rng), {})
        for number, name in enumerate(ARCHITECTURES)
        for world in ((1, 3) if number % 5 == 0 else (3,))
    }
    cases = {key: case for key, case in every.items() if case[0] in names}
    found = train_by_plans(cases, STEPS)
    for key, (name, shares, _) in cases.items():
        assert_same(name, shares, found[key])


@pytest.mark.extended
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
