"""A plan of several stages trains like one process."""

from __future__ import annotations

import pytest

from gpumix.spec.plan import Mode
from models import ARCHITECTURES
from reference import train_alone, worst_error
from staging import Row, rows, staged_plan, train_in_stages

STEPS = 3
TOLERANCE = 1e-5
KEPT = Mode(recompute=False)

LAYOUTS = {
    "1 + 1": rows([6], [6]),
    "1 + 2": rows([6], [2, 4]),
    "1 + 2 + 1": rows([6], [4, 2], [6]),
    "2 + 2, crossing": rows([4, 2], [2, 4]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("stage", [0, 1])
def test_layouts(layout, schedule, stage):
    assert_parity("gpt2", LAYOUTS[layout], schedule=schedule, zero_stage=stage)


@pytest.mark.parametrize(
    ("layout", "waves"),
    [
        (rows([6], [2, 4]), 1),
        (rows([8], [8], micro_batch=1), 2),
        (rows([4, 4], [4, 4]), 2),
        (rows([6, 4], [6, 4]), 2),
    ],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [2, 3])
def test_waves(layout, waves, schedule, stage):
    assert_parity("gpt2", layout, schedule=schedule, zero_stage=stage, waves=waves)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_come_later(stage):
    layout = rows([6], [2, 4], mode=KEPT)
    assert_parity("gpt2", layout, schedule="zero-bubble", zero_stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_stages_go_round(stage):
    """Four units on two ranks, of which each has two stages."""
    one, other = rows([8], [8])
    layout = [one, other, one, other]
    assert_parity("bert", layout, schedule="interleaved", zero_stage=stage)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    assert_parity(name, LAYOUTS["1 + 2"], zero_stage=1)


def assert_parity(name: str, layout: list[Row], **settings):
    plan = staged_plan(name, layout, **settings)
    expected = train_alone(ARCHITECTURES[name], plan.global_batch, STEPS)
    losses, found = train_in_stages(name, plan, STEPS)
    assert worst_error(found, expected) < TOLERANCE
    assert all(seen == losses[0] for seen in losses)
