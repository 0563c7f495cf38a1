"""Losses of a few models as they were: a change of numerics must be on purpose."""

from __future__ import annotations

import pytest

from helpers.extended import left_out
from helpers.training.reference import Share, train_by_plan

SHARES = [Share(3, 2, 1), Share(1, 1, 2), Share(0, 0, 1)]
STEPS = 5


LOSSES = [
    # What processors round differently.
    ("gpt2", "fp32", 1e-4),
    ("llama", "fp32", 1e-4),
    ("t5", "fp32", 1e-4),
    ("gpt2", "bf16", 1e-2),
]


@pytest.mark.parametrize(
    ("name", "dtype", "rel"),
    left_out(LOSSES, LOSSES[1:]),
)
def test_the_losses_are_what_they_were(name, dtype, rel, golden):
    trained = train_by_plan(name, SHARES, STEPS, compute_dtype=dtype)
    golden(f"{name}.{dtype}", trained.losses, rel=rel)
