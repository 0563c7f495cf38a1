"""Numbers of processes that a loop averages: a warning where processes have unequal parts."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.training.reference import Share, plan_for

WIDTH, SAMPLES = 8, 12
DATA = [
    {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)), "labels": i % WIDTH}
    for i in range(SAMPLES)
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, object]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"logits": x} if labels is None else {"loss": F.cross_entropy(x, labels)}


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def evaluated(folder: Path, kind: str, first: int) -> list[str]:
    as_launched(folder)
    from gpumix import Accelerator

    heard = Heard()
    logging.getLogger("gpumix").addHandler(heard)
    shares = [Share(first, first, 1), Share(SAMPLES - first, 4, 1)]
    accelerator = Accelerator(plan=plan_for(Model(), shares, zero_stage=3))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=SAMPLES // 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.eval()
    for batch in itertools.chain(loader, loader):
        with torch.no_grad():
            if kind == "of the model":
                losses = model(**batch)["loss"]
            else:
                reduction = "none" if kind == "of samples" else "mean"
                outputs = model(batch["x"])["logits"]
                losses = F.cross_entropy(outputs, batch["labels"], reduction=reduction)
        if kind == "reduced":
            accelerator.reduce(losses, "mean")
        elif kind == "repeated":
            accelerator.gather(losses.repeat(SAMPLES // 2))
        else:
            accelerator.gather_for_metrics(losses)
    return [said for said in heard.said if "combines a number of each process" in said]


@pytest.mark.parametrize(
    ("kind", "first", "warnings"),
    left_out(
        [
            ("gathered", 2, 1),
            ("reduced", 2, 1),
            ("repeated", 2, 1),
            ("gathered", 6, 0),
            ("of samples", 2, 0),
            ("of the model", 2, 0),
        ],
        [("repeated", 2, 1), ("gathered", 6, 0), ("of samples", 2, 0)],
    ),
)
def test_means_of_unequal_parts_are_warned_of_once(kind, first, warnings, tmp_path):
    for said in run_ranks(evaluated, 2, tmp_path, kind, first, timeout_s=120):
        assert len(said) == warnings
