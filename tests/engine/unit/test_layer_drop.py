"""Blocks that a pass leaves out: at random as LayerDrop does, or for some samples only.

A block that is left out of all micro-batches has no gradient, as in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpumix.engine.model.model_settings import find_layer_drop_rates
from gpumix.schema.plan.stage import Mode
from gpumix.testing import Share
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import Block, Regression, vectors
from helpers.training.reference import (
    Trained,
    assert_step_is_plain,
    engine_alone,
    engine_for,
    joined,
    optimizer_for,
    own_rows,
    pieces_of,
    train_plainly,
    worst_error,
)

INLINE = Mode(order="sequential", recompute=False)
LEFT_OUT = [(), (1,), (0, 3), (2, 3), (0, 1, 2, 3)]  # of each step
SAMPLES = 4


class LeavesOut(Regression):
    """The caller says which blocks."""

    layerdrop = 0.0

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(4)])
        self.layerdrop = 0.5

    def forward(self, x: torch.Tensor, target: torch.Tensor, left_out: torch.Tensor) -> Any:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if not (self.training and self.layerdrop and left_out[0, number]):
                x = block(x)
        return self.error(x, target)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for numbers in LEFT_OUT:
        left_out = torch.zeros(SAMPLES, 4, dtype=torch.int64)
        left_out[:, list(numbers)] = 1
        found.append({**vectors(SAMPLES, generator), "left_out": left_out})
    return found


def train(shares: list[Share], settings: dict[str, Any]) -> tuple[list[float], Any]:
    engine = engine_for(LeavesOut, shares, **settings)
    engine.model.train()
    optimizer = optimizer_for(engine.parameters())
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        losses.append(engine.step(own_rows(batch, shares, engine.comm.rank)).item())
        optimizer.step()
    return losses, pieces_of(engine)


ENDS = {
    "before": ("enter.weight", "enter.bias"),
    "after": ("leave.weight", "leave.bias", "norm.weight", "norm.bias"),
}
CASES: list[tuple[list[Share], dict[str, Any]]] = [
    ([Share(4, 2, 1)], {"zero_stage": 3}),
    ([Share(4, 2, 1, INLINE)], {"zero_stage": 0}),
    ([Share(3, 2, 1), Share(1, 1, 2)], {"zero_stage": 3}),
    ([Share(3, 1, 1, INLINE), Share(1, 1, 2, INLINE)], {"zero_stage": 1}),
    ([Share(3, 2, 1), Share(1, 1, 2)], {"zero_stage": 3, "stage": ENDS}),
    ([Share(3, 1, 1, INLINE), Share(1, 1, 2, INLINE)], {"zero_stage": 1, "stage": ENDS}),
]


@pytest.mark.parametrize(
    ("shares", "settings"),
    left_out(CASES, [CASES[0], CASES[3], CASES[5]]),
    ids=["alone", "alone, in a row", "two ranks", "in a row", "ends", "ends in a row"],
)
def test_training_is_that_of_one_process(shares, settings):
    alone = len(shares) == 1
    results = [train(shares, settings)] if alone else run_ranks(train, 2, shares, settings)
    found = Trained(results[0][0], joined([pieces for _, pieces in results]))
    assert worst_error(found, train_plainly(LeavesOut, batches())) < 2e-5


@pytest.mark.parametrize("config", [0.5, {"layerdrop": 0.5}, (1, 2)])
def test_what_modules_call_their_config_may_be_anything(config):
    """IDEFICS keeps a rate there."""

    def factory():
        model = Regression([Block(), Block()])
        model.enter.config = config
        return model

    assert find_layer_drop_rates(factory()).on == []
    batch = vectors(2, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(factory, 2, 1), factory, batch)
