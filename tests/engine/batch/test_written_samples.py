"""Models that write into their samples."""

from __future__ import annotations

import pytest
import torch

from gpumix.schema.plan.stage import Mode
from helpers.training.models import Block, Regression, vectors
from helpers.training.reference import (
    assert_gradients_equal,
    engine_alone,
    joined,
    pieces_of,
    plain_step,
)


class WritesLabels(Regression):
    """It replaces labels that do not count, in place, as FSMT does; and keeps what it replaced them
    by for backward."""

    def __init__(self):
        super().__init__([Block(), Block()])

    def forward(self, x, target):
        target.masked_fill_(target < 0, 0.5)
        loss, count = super().forward(x, target)
        return loss + (self.enter.weight.sum() * 0.01 * target).sum(), count


@pytest.mark.parametrize("mode", [Mode(), Mode(order="sequential", recompute=False)])
def test_a_model_may_write_into_its_samples(mode):
    batch = vectors(6, torch.Generator().manual_seed(0))
    written = {name: value.clone() for name, value in batch.items()}
    engine = engine_alone(WritesLabels, 6, 2, mode=mode, zero_stage=0)
    loss, expected = plain_step(WritesLabels, {n: v.clone() for n, v in batch.items()})
    assert abs(engine.step(written).item() / loss - 1) < 1e-5
    assert_gradients_equal(joined([pieces_of(engine, gradients=True)]), expected)
