"""The loss of a model on a micro-batch, as a sum and a count.

Sums add up over micro-batches and ranks, means do not: a step's loss is the sum of all losses over
the *global* count, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gpumix.engine.coroutine import ModelError
from gpumix.engine.documents import mask_of_documents
from gpumix.engine.head import expected_gradient

Objective = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's and transformers' ignore_index


def objective_of(model: nn.Module) -> Objective:
    """The objective for a model: `transformers` models have a mean loss over the labels that they
    count; any other model must return (summed loss, count) itself."""
    return mean_over_labels if hasattr(model, "loss_function") else summed_by_model


def mean_over_labels(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """For models that return a mean loss over the labels that are not -100.

    Auxiliary terms that are no mean over labels (the balancing loss of a mixture of experts) are
    thereby weighted by each micro-batch's number of labels.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ModelError(
            "a transformers model needs batches with 'labels'",
            where=f"batch with {_describe(batch)}",
            fix="put 'labels' into the batch, or give your own `loss` to gpumix.prepare",
        )
    labels = batch["labels"]
    count = number_of_labels(model, labels)
    # A micro-batch without any label would have a mean loss of 0 / 0; with some other label it has
    # a finite one, and both loss and gradient are multiplied with 0.
    labels = torch.where(count > 0, labels, torch.zeros_like(labels))
    batch = {**batch, **mask_of_documents(model, batch), "labels": labels}
    with expected_gradient(count) as expected:
        loss = model(**batch).loss
        expected.settle(loss)
    # In fp32: a sum over many labels is beyond fp16's range.
    return loss.float() * count, count


def number_of_labels(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """Over how many labels a `transformers` model's loss is a mean."""
    return (counted_labels(model, labels) != IGNORED_LABEL).sum()


def counted_labels(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """The labels that enter the loss of a `transformers` model; all, of any other."""
    # That loss compares each position with the next label. Encoder-decoders have it by name too,
    # but shift their decoder's input instead.
    loss = getattr(model, "loss_function", None)
    shifts = getattr(loss, "__name__", "") == "ForCausalLMLoss"
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return labels[..., 1:] if shifts and not encoder_decoder else labels


def summed_by_model(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """For models whose forward returns (summed loss, count)."""
    with expected_gradient(torch.ones(())) as expected:
        result = model(**batch) if isinstance(batch, Mapping) else model(*_as_tuple(batch))
        if not isinstance(result, tuple) or len(result) != 2 or not torch.is_tensor(result[0]):
            raise ModelError(
                f"{type(model).__name__} returned a {type(result).__name__}, not (summed loss, "
                "count)",
                fix="return that from forward (a summed loss, not a mean one, and what it is a sum "
                "over); in Python `gpumix.prepare(loss=function(model, batch))` may return it "
                "instead",
            )
        expected.settle(result[0])
    return result


def _as_tuple(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _describe(batch: Any) -> str:
    return ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
