"""Teams that divide the positions of samples too train like one process."""

from __future__ import annotations

import pytest

from gpumix.spec.plan import Mode
from models import ARCHITECTURES
from reference import train_alone, worst_error
from staging import rows, staged_plan, train_in_stages

STEPS = 3
TOLERANCE = 1e-5
KEPT = Mode(recompute=False)
TEAM = rows([5], tensor=[2], sequence=True)
LAYOUTS = {
    "a team": TEAM,
    "two teams": rows([4, 3], tensor=[2], sequence=True),
    "a team, then one": rows([6], [6], tensor=[2, 1], sequence=True),
    "one, then a team": rows([6], [6], tensor=[1, 2], sequence=True),
    "a team each": rows([6], [6], tensor=[2, 2], sequence=True),
}


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert", "t5"])
def test_architectures(name):
    assert_parity(name, TEAM, zero_stage=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_layouts(layout, stage):
    assert_parity("qwen3", LAYOUTS[layout], zero_stage=stage)


def assert_parity(name, layout, **settings):
    plan = staged_plan(name, layout, **settings)
    expected = train_alone(ARCHITECTURES[name], plan.global_batch, STEPS)
    losses, found = train_in_stages(name, plan, STEPS)
    assert worst_error(found, expected) < TOLERANCE
    assert all(of_rank == losses[0] for of_rank in losses)
