"""Losses that couple the samples of a batch, by a plan that cuts none."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpumix.engine.prepare import prepare
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.training.reference import Share, plan_for

BATCH, SAMPLES, WIDTH = 12, 48, 16


class Contrasting(nn.Module):
    """Norms over the batch, and negatives in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        z = F.normalize(x, dim=-1)
        return {"loss": F.cross_entropy(10 * z @ z.T, torch.arange(len(z))), "logits": z}


def trained(folder: Path, world: int) -> dict[str, Any]:
    as_launched(folder)
    from transformers import TrainingArguments

    more: dict[str, Any] = {}
    if world == 1:
        from transformers import Trainer
    else:
        from gpumix.integrations.common import plan_and_shard
        from gpumix.integrations.transformers import Trainer

        plan_and_shard.profile = partial(plan_and_shard.profile, budget_s=2.0)
        more["couples"] = "batch"
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(8, generator=generator), "labels": 0} for _ in range(SAMPLES)]
    args = TrainingArguments(
        str(folder / f"out-{world}"),
        per_device_train_batch_size=BATCH // world,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    trainer = Trainer(model=Contrasting(), args=args, train_dataset=data, **more)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    plan = trainer.plan if world > 1 else None
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "samples": [BATCH] if plan is None else [w.samples for w in plan.workers],
    }


@pytest.mark.slow
def test_one_device_computes_each_batch_at_once(tmp_path):
    """By a plan that is made of measurements."""
    (stock,) = run_ranks(trained, 1, tmp_path, 1)
    for rank in run_ranks(trained, 2, tmp_path, 2, timeout_s=120):
        assert rank["losses"] == pytest.approx(stock["losses"], rel=1e-4)
        assert rank["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        assert sorted(rank["samples"]) == [0, BATCH]


@pytest.mark.parametrize(
    ("couples", "told"),
    [
        ("batch", {"code": "couples-whole-batch", "what": "batch"}),
        ("sample", {"code": "couples-unknown", "what": "sample"}),
    ],
)
def test_what_couples_says_is_checked(couples, told):
    model = Contrasting()
    with raises(InputError, **told):
        prepare(model, plan_for(model, [Share(6, 3, 1)]), couples=couples)
    prepare(model, plan_for(model, [Share(6, 6, 1)]), couples="batch")
