"""`gpumix.testing`, as users take it to test a model of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gpumix
from gpumix.testing import Share, plan_for


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().sum(), torch.tensor(x.numel())


def test_a_model_of_ones_own_under_an_uneven_plan():
    torch.manual_seed(0)
    model, x, y = Own(), torch.randn(6, 4), torch.randn(6, 4)
    total, count = model(x, y)
    plan = plan_for(model, [Share(6, 4, state=1)], zero_stage=3)
    engine = gpumix.prepare(model, plan)
    assert engine.step({"x": x, "y": y}).item() == pytest.approx((total / count).item())


def test_a_plan_for_two_ranks():
    plan = plan_for(Own(), [Share(5, 2, state=1), Share(1, 1, state=3)])
    assert [w.samples for w in plan.workers] == [5, 1]
    assert [w.state_share for w in plan.workers] == [0.25, 0.75]
    assert plan.global_batch == 6


def test_names_that_are_promised():
    assert gpumix.testing.__all__ == ["Share", "plan_for"]
