"""Ranks that compute units together train like one process."""

from __future__ import annotations

import pytest

from gpumix.spec.plan import Mode
from models import ARCHITECTURES
from reference import train_alone, worst_error
from staging import rows, staged_plan, train_in_stages

STEPS = 3
TOLERANCE = 1e-5
KEPT = Mode(recompute=False)
LAYOUTS = {
    "a team": rows([5], tensor=[2]),
    "two teams": rows([4, 3], tensor=[2]),
    "a team, then one": rows([6], [6], tensor=[2, 1]),
    "one, then a team": rows([6], [6], tensor=[1, 2]),
    "a team each": rows([6], [6], tensor=[2, 2]),
    "a team, then two": rows([6], [4, 2], tensor=[2, 1]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layouts(layout, stage):
    assert_parity("llama", LAYOUTS[layout], zero_stage=stage)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert", "t5"])
@pytest.mark.parametrize("layout", ["two teams", "a team, then one"])
def test_architectures(name, layout):
    assert_parity(name, LAYOUTS[layout], zero_stage=1)


def assert_parity(name, layout, **settings):
    plan = staged_plan(name, layout, **settings)
    expected = train_alone(ARCHITECTURES[name], plan.global_batch, STEPS)
    losses, found = train_in_stages(name, plan, STEPS)
    assert worst_error(found, expected) < TOLERANCE
    assert all(of_rank == losses[0] for of_rank in losses)
