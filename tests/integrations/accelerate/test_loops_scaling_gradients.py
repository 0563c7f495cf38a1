"""Loops multiplying the model's own loss by numbers, and clipping between backward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gpumix.schema.errors import InputError
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched, make_accelerator
from helpers.training.reference import Share, plan_for

WIDTH, CLASSES, SAMPLES = 8, 3, 12
DATA = [
    {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)), "labels": i % CLASSES}
    for i in range(3 * SAMPLES)
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        z = self.head(x)
        return {"loss": F.cross_entropy(z, labels), "logits": z}


def factor(kind: str, step: int, batch: Any, accelerator: Any) -> float | torch.Tensor:
    """Return the number that multiplies a loss."""
    own = batch["x"][:, 0].exp()
    if kind == "of all":
        sums = accelerator.reduce(torch.stack([own.sum(), torch.tensor(float(len(own)))]), "sum")
        return sums[0] / sums[1]
    if kind == "of the rank" or (kind == "of the rank later" and step == 1):
        return own.mean()
    return 0.5


def trained(folder: Path, world: int, kind: str) -> list[float]:
    as_launched(folder)
    accelerator = make_accelerator(
        world,
        lambda: plan_for(Model(), [Share(5, 2, 3), Share(7, 4, 1)], zero_stage=3),
        gradient_accumulation_steps=3 if kind.startswith("clipped") else 1,
    )
    network = Model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    loader = DataLoader(DATA, batch_size=SAMPLES // world)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    found = []
    for step, batch in enumerate([*loader, *loader]):
        with accelerator.accumulate(network):
            loss = network(**batch)["loss"]
            accelerator.backward(loss * factor(kind, step, batch, accelerator))
            found.append(loss.item())
            if kind == "clipped by norm":
                accelerator.clip_grad_norm_(network.parameters(), 0.01)
            if kind == "clipped by value":
                accelerator.clip_grad_value_(network.parameters(), 0.001)
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["of all", "clipped by norm", "clipped by value"])
def test_a_loop_is_as_with_the_stock_accelerator(kind, tmp_path):
    (stock,) = run_ranks(trained, 1, tmp_path, 1, kind)
    for rank in run_ranks(trained, 2, tmp_path, 2, kind, timeout_s=120):
        assert rank == pytest.approx(stock, rel=1e-4, abs=1e-6)


def refused(folder: Path, kind: str) -> str:
    with pytest.raises(InputError) as error:
        trained(folder, 2, kind)
    return str(error.value)


@pytest.mark.parametrize("kind", ["of the rank", "of the rank later"])
def test_a_factor_that_differs_between_processes_is_refused(kind, tmp_path):
    for said in run_ranks(refused, 2, tmp_path, kind, timeout_s=120):
        assert "processes multiply the model's loss by unlike numbers" in said
        assert ("one call before" in said) == (kind == "of the rank later")
