"""Losses of a trainer that accumulates gradients, as the stock trainer scales them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.training.reference import Share, plan_for

BATCH, ACCUMULATES, STEPS = 4, 2, 3
# One batch in the last step of an epoch.
SAMPLES = (STEPS - 1) * BATCH * ACCUMULATES + BATCH


class Sentences(Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(5, 90, (SAMPLES, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens[0] % 2}


def model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(1)
    return BertForSequenceClassification(config)


def model_by_items() -> nn.Module:
    """Return a model of a program that divides by the number of labels itself."""
    from transformers import BertForSequenceClassification

    class Own(BertForSequenceClassification):
        def forward(self, input_ids, labels=None, num_items_in_batch=None, **more):
            outputs = super().forward(input_ids=input_ids)
            number = labels.numel() if num_items_in_batch is None else num_items_in_batch
            summed = cross_entropy(outputs.logits, labels, reduction="sum")
            return {"loss": summed / number, "logits": outputs.logits}

    network = model()
    network.__class__ = Own
    return network


def mean_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits, labels)


def mean_by_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def mean_and_term(trainer: Any, outputs: Any, labels: Tensor, items: Any) -> Tensor:
    """Like TRL's losses with a balancing term."""
    term = outputs.logits.pow(2).mean() / trainer.current_gradient_accumulation_steps
    return mean_by_items(outputs, labels, items) + term


# What a trainer's own `compute_loss` returns.
COMPUTED = {
    "a mean": lambda trainer, outputs, labels, items: mean_of(outputs, labels),
    "a sum": lambda trainer, outputs, labels, items: mean_of(outputs, labels) * len(labels),
    "a mean by steps": lambda trainer, outputs, labels, items: (
        mean_of(outputs, labels) / trainer.args.gradient_accumulation_steps
    ),
    "a mean by current steps": lambda trainer, outputs, labels, items: (
        mean_of(outputs, labels) / trainer.current_gradient_accumulation_steps
    ),
    "a mean by items": lambda trainer, outputs, labels, items: mean_by_items(
        outputs, labels, items
    ),
    "a mean by items and a term": mean_and_term,
}
CASES = {
    "the model's": {},
    "the model's by items": {"model": model_by_items},
    "smoothed": {"label_smoothing_factor": 0.1},
    "a function's": {"compute_loss_func": mean_of},
    "a function's by items": {"compute_loss_func": mean_by_items},
    **{name: {"computed": name} for name in COMPUTED},
    "a mean, said to be unscaled": {"computed": "a mean", "loss_is_scaled_for_ga": False},
    "a sum, said to be unscaled": {"computed": "a sum", "loss_is_scaled_for_ga": False},
}


def subclass(stock: Any, *, computed: str = "", **attributes: Any) -> Any:
    """Return the trainer's class with a loss and attributes of a program."""

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = COMPUTED[computed](self, outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    attributes |= {"compute_loss": compute_loss} if computed else {}
    return type("Own", (stock,), attributes)


def trained(folder: Path, ours: bool) -> dict[str, list[float]]:
    as_launched(folder)
    import transformers

    library: Any = transformers
    if ours:
        from gpumix.integrations import transformers as library
    found = {}
    for name, given in CASES.items():
        network, processes = given.get("model", model)(), 2 if ours else 1
        more: dict[str, Any] = {}
        if ours:
            more["plan"] = plan_for(model(), [Share(6, 3, 2), Share(2, 1, 1)], zero_stage=3)
        if "compute_loss_func" in given:
            more["compute_loss_func"] = given["compute_loss_func"]
        own = {key: given[key] for key in ("computed", "loss_is_scaled_for_ga") if key in given}
        trainer = subclass(library.Trainer, **own)(
            model=network,
            args=transformers.TrainingArguments(
                output_dir=str(folder / "out"),
                per_device_train_batch_size=BATCH // processes,
                gradient_accumulation_steps=ACCUMULATES,
                label_smoothing_factor=given.get("label_smoothing_factor", 0.0),
                max_steps=STEPS,
                learning_rate=5e-3,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=Sentences(),
            **more,
        )
        trainer.train()
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        found[name] = [log[key] for log in logs for key in ("loss", "grad_norm")]
        assert "loss_function" not in vars(network) and "_loss_function" not in vars(network)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("accumulated")
    (stock,) = run_ranks(trained, 1, folder, False, timeout_s=120)
    return stock, run_ranks(trained, 2, folder, True, timeout_s=240)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_scaled_as_by_the_stock_trainer(case, both):
    stock, ours = both
    assert len(stock[case]) == 2 * STEPS
    for rank in ours:
        assert rank[case] == pytest.approx(stock[case], rel=1e-4)
