"""Label smoothing of a model whose labels transformers counts otherwise than its loss does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from gpumix.testing import Share, plan_for
from helpers.processes.harness import run_ranks

pytestmark = pytest.mark.slow
LENGTH = 12


def samples() -> list[dict[str, torch.Tensor]]:
    """Of some the first token has a label, which no token comes before."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, 30, (12, LENGTH), generator=generator)
    masked = [int(n) for n in torch.randint(0, 10, (12,), generator=generator)]
    return [
        {"input_ids": row, "labels": torch.where(torch.arange(LENGTH) < first, -100, row)}
        for row, first in zip(rows, masked)
    ]


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def trained(folder: Path, ours: bool) -> list[float]:
    """The loss of an evaluation, then of each step."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    more = {}
    if ours:
        from gpumix.integrations.transformers import Trainer

        more["plan"] = plan_for(model, [Share(6, 4, 1)], sequence_length=LENGTH)
    else:
        from transformers import Trainer
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=6,
        per_device_eval_batch_size=12,
        max_steps=2,
        logging_steps=1,
        label_smoothing_factor=0.1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    rows = samples()
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collated, **more
    )
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [evaluated, *(one["loss"] for one in trainer.state.log_history if "loss" in one)]


def test_losses_are_those_of_the_stock_trainer(tmp_path):
    (stock,) = run_ranks(trained, 1, tmp_path / "stock", False, timeout_s=60)
    (ours,) = run_ranks(trained, 1, tmp_path / "ours", True, timeout_s=60)
    assert len(stock) == 3
    assert ours == pytest.approx(stock, rel=1e-4)
