"""The loss of a model on a micro-batch, as a sum and a count.

Sums add up over micro-batches and ranks, means do not: a step's loss is the sum of all losses over
the *global* count, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.engine.coroutine import ModelError
from gpumix.engine.documents import mask_of_documents
from gpumix.engine.head import expected_gradient
from gpumix.engine.reduction import ReducedLoss, Reduces, Rule, SummedLoss, integer_labels


def objective_of(model: nn.Module, rule: Rule | None = None) -> Reduces:
    """The objective for a model: `transformers` models return a reduced loss; any other model must
    return (summed loss, count) itself.

    Args:
        rule: by which the losses of micro-batches add up, if that is known.
    """
    if hasattr(model, "loss_function"):
        return ReducedLoss(loss_by_model, integer_labels, rule=rule, may_trim=True)
    return SummedLoss(summed_by_model, rule)


def loss_by_model(
    model: nn.Module, batch: Any, labels: Mapping[str, Tensor], count: Tensor | None
) -> Tensor:
    """The loss that a `transformers` model computes from the labels in a batch.

    Args:
        labels: to be used instead of the batch's own.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ModelError(
            "a transformers model needs batches with 'labels'",
            where=f"batch with {_describe(batch)}",
            fix="put 'labels' into the batch, or give your own `loss` to gpumix.prepare",
        )
    loss: Tensor = model(**{**batch, **mask_of_documents(model, batch), **labels}).loss
    return loss


def summed_by_model(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
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
