"""Numbers and facts in words."""

from __future__ import annotations

import pytest

from gpumix.schema.plan.stage import Mode
from gpumix.train.run_figures import words


@pytest.mark.parametrize(
    ("gap", "said", "far"),
    [
        (None, "", False),
        (0.0, "as planned", False),
        (0.004, "as planned", False),
        (0.096, "10% slower than planned", False),
        (0.77, "77% slower than planned", True),
        (-0.3, "30% faster than planned", True),
        (1.0, "2.0× the planned time", True),
        (6.2, "7.2× the planned time", True),
    ],
)
def test_the_distance_from_the_plan(gap, said, far):
    assert words.describe_gap(gap) == said
    assert words.is_far_off(gap) == far


@pytest.mark.parametrize(
    ("predicted", "measured", "said"),
    [(10, 10, "equal"), (10, 12, "20% more"), (10, 7, "30% less"), (10, 25, "2.5× as much"),
     (None, 7, "–"), (0, 7, "–"), (10, None, "–")],
)  # fmt: skip
def test_a_measurement_against_its_prediction(predicted, measured, said):
    assert words.describe_excess(predicted, measured) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, ""), (0, ""), (0.2, "1 s left"), (55.4, "55 s left"), (125, "2 min 5 s left"),
     (7_500, "2 h 5 min left"), (100_000, "1 d 3 h left")],
)  # fmt: skip
def test_the_time_left(seconds, said):
    assert words.format_remaining(seconds) == said


@pytest.mark.parametrize(
    ("model", "parameters", "said"),
    [
        ({"config": {"model_type": "gpt2"}}, 124_439_808, "gpt2, 124M parameters"),
        ({"config": "/models/Llama-3-8B/config.json"}, None, "Llama-3-8B"),
        ({"config": "/a/b.json", "weights": "/m/Qwen3-4B"}, 4e9, "Qwen3-4B, 4B parameters"),
        ({"weights": "/models/mine/model.safetensors", "config": {}}, None, "mine"),
        ({"factory": "toys:model"}, 3_260, "toys:model, 3.26K parameters"),
        ({}, 320, "320 parameters"),
        ({}, None, ""),
    ],
)  # fmt: skip
def test_a_model_is_named_by_where_it_is_from(model, parameters, said):
    assert words.describe_model(model, parameters) == said


def test_modes_are_told_in_the_terms_of_the_field():
    assert words.describe_mode(Mode()) == "activation checkpointing"
    kept = Mode(recompute=False, order="sequential", head="chunked")
    assert words.describe_mode(kept) == (
        "no activation checkpointing, one micro-batch after the other, chunked cross-entropy"
    )
    offloaded = Mode(boundary="host")
    assert words.describe_mode(offloaded) == "activation checkpointing, activations in host memory"
