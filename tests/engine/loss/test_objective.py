"""A model's mean loss as a sum and a count: sums over any cut of a batch add up to the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpumix.engine.loss.objective import make_objective
from gpumix.engine.model.forward_coroutine import ModelError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.training.known_losses import known_loss
from helpers.training.models import ARCHITECTURES, mean_loss
from helpers.training.reference import batches, initialised

WITH_LABELS = [n for n in ARCHITECTURES if not n.startswith("plain")]


@pytest.mark.parametrize("name", left_out(WITH_LABELS, ["whisper"]))
def test_sums_over_parts_are_the_mean_of_the_whole(name):
    model = initialised(ARCHITECTURES[name].factory)
    batch = next(batches(ARCHITECTURES[name], 6, 1))
    parts = [{k: v[rows] for k, v in batch.items()} for rows in (slice(0, 1), slice(1, 6))]
    with torch.no_grad():
        sums, counts = zip(*(known_loss(model)(model, part) for part in parts))
        expected = mean_loss(model, batch)
    assert float(sum(sums) / sum(counts)) == pytest.approx(float(expected), rel=1e-6)


def test_a_part_without_labels_counts_for_nothing():
    model = initialised(ARCHITECTURES["gpt2"].factory)
    batch = next(batches(ARCHITECTURES["gpt2"], 2, 1))
    loss, count = make_objective(model)(model, {**batch, "labels": torch.full((2, 12), -100)})
    assert count == 0
    assert loss == 0
    loss.backward()
    assert all(not p.grad.any() for p in model.parameters())


class HalfPrecision(nn.Module):
    loss_function = object()
    config = SimpleNamespace()

    def forward(self, x, labels):
        return SimpleNamespace(loss=torch.tensor(8.0, dtype=torch.float16))


def test_a_sum_over_many_labels_does_not_overflow_half_precision():
    labels = torch.zeros(2, 10_000, dtype=torch.long)
    model = HalfPrecision()
    loss, count = known_loss(model)(model, {"x": labels, "labels": labels})
    assert loss.item() == 160_000
    assert count == 20_000


def test_transformers_models_need_labels():
    model = ARCHITECTURES["gpt2"].factory()
    with raises(ModelError, code="batch-without-labels", what="labels"):
        make_objective(model)(model, {"input_ids": torch.zeros(1, 4, dtype=torch.long)})


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.make(tensors)


@pytest.mark.parametrize(
    "result", [torch.zeros(3), (1.0, 2), {"logits": torch.zeros(())}, (torch.zeros(()),) * 3, None]
)
def test_other_models_return_a_loss(result):
    with raises(ModelError, code="model-without-loss"):
        model = Returns(lambda tensors: result)
        make_objective(model)(model, torch.zeros(1))


def test_models_may_return_a_sum_and_a_count():
    model = Returns(lambda tensors: (sum(t.sum() for t in tensors), torch.tensor(len(tensors))))
    ones, objective = torch.ones(2), make_objective(model)
    assert objective(model, (ones, ones)) == (4, 2)
    assert objective(model, ones) == (2, 1)


LOGITS = torch.zeros(2, 3)
REDUCED = {
    "alone": lambda loss: loss,
    "after logits": lambda loss: (LOGITS, loss),
    "before logits": lambda loss: (loss, LOGITS),
    "in a mapping": lambda loss: {"loss": loss, "logits": LOGITS},
    "as an attribute": lambda loss: SimpleNamespace(loss=loss),
}


@pytest.mark.parametrize("name", REDUCED)
def test_models_may_return_a_reduced_loss(name):
    model = Returns(lambda tensors: REDUCED[name](tensors[0].mean()))
    objective = make_objective(model)
    for _ in range(2):
        assert objective(model, torch.ones(4)) == (4, 4)


def test_models_return_the_same_kind_of_loss_for_every_batch():
    kinds = iter([lambda t: (t[0].sum(), 2), lambda t: t[0].mean()])
    model = Returns(lambda tensors: next(kinds)(tensors))
    objective = make_objective(model)
    objective(model, torch.ones(2))
    with raises(ModelError, code="loss-form-changed"):
        objective(model, torch.ones(2))
