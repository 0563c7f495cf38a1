"""How programs with a trainer evaluate and predict, and the numbers that come of it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from helpers.scripts.programs import Texts, accuracy

TOGETHER = 4  # samples of a batch of all processes

NOT_COMPARED = ("_runtime", "_per_second", "_time", "epoch")


class ByBatch:
    """Metrics of batches, which come as tensors, one after the other."""

    def __init__(self) -> None:
        self._sums = np.zeros(3, dtype=int)

    def __call__(self, told: Any, compute_result: bool) -> dict[str, int]:
        guessed, labels = told.predictions[:, :-1].argmax(-1), told.label_ids[:, 1:]
        right = (guessed.eq(labels) & labels.ne(-100)).sum().item()
        self._sums += [right, len(told.losses), told.inputs["attention_mask"].sum().item()]
        names = ("right", "losses", "tokens")
        return dict(zip(names, self._sums.tolist())) if compute_result else {}


class Unlabelled(Texts):
    """Of the first batch no loss can be told."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return row if index >= TOGETHER else {**row, "labels": row["labels"].fill_(-100)}


class Flowing(IterableDataset):
    """Does not say how many there are."""

    def __iter__(self) -> Any:
        texts = Texts(10, seed=2)
        return (texts[n] for n in range(len(texts)))


def losses_of_batches(told: Any) -> dict[str, float]:
    return {f"loss {n}": float(loss) for n, loss in enumerate(told.losses)}


def of_lists(told: Any) -> dict[str, int]:
    """Metrics of the batches' arrays, which are not put together."""
    found = {}
    of_batches = zip(told.predictions, told.label_ids, told.inputs)
    for batch, (guessed, labels, inputs) in enumerate(of_batches):
        right = (guessed[:, :-1].argmax(-1) == labels[:, 1:]).sum()
        found |= {f"right {batch}": int(right), f"inputs {batch}": int(inputs.sum())}
    return found


def of_logits(told: Any) -> dict[str, float]:
    guessed = told.predictions.argmax(-1)
    return accuracy(SimpleNamespace(predictions=guessed, label_ids=told.label_ids))


def evaluated(trainer: Any) -> list[float]:
    found = trainer.evaluate()
    return [value for name, value in sorted(found.items()) if not name.endswith(NOT_COMPARED)]


def predicted(trainer: Any) -> list[float]:
    """Of all that the model returns, of less, and of losses alone."""
    trainer.model.config.output_hidden_states = True
    data = trainer.eval_dataset
    whole, less = trainer.predict(data), trainer.predict(data, ignore_keys=["hidden_states"])
    trainer.args.prediction_loss_only = True
    nothing = trainer.predict(data)
    assert nothing.predictions is None and "test_loss" in nothing.metrics
    logits, hidden = whole.predictions
    assert np.array_equal(logits, less.predictions)
    return [float(number) for one in (logits, *hidden) for number in one[:, 0, :2].flatten()]


def seen_tokens(trainer: Any) -> list[float]:
    return [trainer.state.num_input_tokens_seen]


def stops_early() -> Any:
    from transformers import EarlyStoppingCallback

    return EarlyStoppingCallback(2)


def evaluations() -> dict[str, dict[str, Any]]:
    return {
        "tokens that are counted": {
            "include_num_input_tokens_seen": "non_padding",
            "then": seen_tokens,
        },
        "metrics of batches": {
            "batch_eval_metrics": True,
            "include_for_metrics": ["inputs", "loss"],
            "compute_metrics": ByBatch,
            "then": evaluated,
        },
        "metrics of batches that stay apart": {
            "eval_do_concat_batches": False,
            "include_for_metrics": ["inputs"],
            "compute_metrics": lambda: of_lists,
            "then": evaluated,
        },
        "outputs that are left out": {"then": predicted},
        "losses of batches": {
            "include_for_metrics": ["loss"],
            "compute_metrics": lambda: losses_of_batches,
            "then": evaluated,
        },
        "larger batches than in training": {
            "eval_dataset": partial(Texts, 47, seed=2),
            "evaluated_together": 18,
            "then": evaluated,
        },
        "a stream that is held out": {"eval_dataset": Flowing, "then": evaluated},
        "larger batches of a stream": {
            "eval_dataset": Flowing,
            "evaluated_together": 16,
            "then": evaluated,
        },
        "a batch without labels": {"eval_dataset": partial(Unlabelled, 10), "then": evaluated},
        "metrics of whole batches": {
            "dataloader_drop_last": True,
            "compute_metrics": lambda: of_logits,
            "then": evaluated,
        },
        "the best adapters": {
            "model": "with adapters and a head",
            "learning_rate": 1.0,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "save_only_model": True,
            "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy",
            "compute_metrics": lambda: of_logits,
            "then": evaluated,
        },
        "an end before the last step": {
            "callbacks": stops_early,
            "num_train_epochs": 9,
            "learning_rate": 1.0,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy",
            "compute_metrics": lambda: of_logits,
            "then": evaluated,
        },
    }
