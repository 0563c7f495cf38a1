"""Objectives: the loss of a model on a micro-batch, as a sum and a count.

Sums add up over micro-batches and ranks, means do not. A step's loss is the sum of all losses over
the *global* count, for any plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.engine.loss.reduction import (
    SAMPLES,
    SUM_AND_COUNT,
    Compute,
    LossProbe,
    ObjectiveWithRule,
    ReducedLoss,
    ReductionRule,
    compute_model_loss,
    expect_gradient,
    integer_labels,
    probe_of_sum,
)
from gpumix.engine.model.forward_coroutine import ModelError


def make_objective(model: nn.Module, rule: ReductionRule | None = None) -> ObjectiveWithRule:
    """Return the objective of a model. `transformers` models return a reduced loss, other models a
    reduced loss or (summed loss, count).

    Args:
        rule: the rule by which losses of micro-batches add up, if known.
    """
    if hasattr(model, "loss_function"):
        return ReducedLoss(compute_model_loss, integer_labels, rule=rule, may_trim=True)
    return ReturnedLoss(rule)


class ReturnedLoss(ReducedLoss):
    """Loss returned by a model's forward: (summed loss, count), or a reduced loss, alone, in a
    tuple with tensors such as logits, in a mapping, or as an attribute `loss`."""

    def __init__(self, rule: ReductionRule | None = None) -> None:
        super().__init__(_compute_reduced_loss, integer_labels, rule=rule)
        self._is_summed: bool | None = None  # as seen in the last forward

    def __call__(
        self, model: nn.Module, batch: Any, compute: Compute | None = None, *, times: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        if self.rule not in (None, SUM_AND_COUNT):
            return super().__call__(model, batch, compute, times=times)
        # Without a rule the batch is not cut, so samples can replace any denominator of a mean.
        samples = self.count(batch, SAMPLES)
        upstream = samples if self._is_summed is False else torch.ones_like(samples)
        with expect_gradient(upstream) as expected:
            result = _forward(model, batch)
            loss, is_summed = _extract_loss(model, result), _is_summed(result)
            if is_summed or self._is_summed is False:
                expected.settle(loss)
            else:  # unknown in the first forward
                expected.undo_all()
        if self._is_summed not in (None, is_summed):
            raise _make_kind_error(model)
        self._is_summed = is_summed
        if is_summed:
            return loss, torch.as_tensor(result[1])
        return loss.float() * samples, samples

    def rules(self, batch: Any) -> tuple[ReductionRule, ...]:
        return (SUM_AND_COUNT, *super().rules(batch))

    def probe(self, model: nn.Module, batch: Any) -> LossProbe:
        result = _forward(model, batch)
        loss = _extract_loss(model, result)
        rules = super().rules(batch)
        nothing = torch.full((), torch.nan)
        if _is_summed(result):
            found = probe_of_sum(*result)
            return replace(found, counts=(*found.counts, *[nothing] * len(rules)))
        found = self.probe_of(loss, [self.count(batch, rule) for rule in rules[:-1]])
        return replace(found, counts=(nothing, *found.counts))


def _compute_reduced_loss(
    model: nn.Module, batch: Any, labels: Mapping[str, Tensor], count: Tensor | None
) -> Tensor:
    """Return the reduced loss of a forward."""
    if labels:
        batch = {**batch, **labels}
    result = _forward(model, batch)
    loss = _extract_loss(model, result)
    if _is_summed(result):
        raise _make_kind_error(model)
    return loss


def _make_kind_error(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} returned (summed loss, count) for one batch, and a reduced loss "
        "for another one",
        code="loss-form-changed",
        fix="return the same kind of loss from forward for every batch",
    )


def _forward(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(*_as_tuple(batch))


def _is_summed(result: Any) -> bool:
    """Return whether a result is (summed loss, count)."""
    if not isinstance(result, tuple) or len(result) != 2 or not torch.is_tensor(result[0]):
        return False
    count = result[1]
    is_number = isinstance(count, int | float) or (torch.is_tensor(count) and count.dim() == 0)
    return result[0].dim() == 0 and is_number


def _extract_loss(model: nn.Module, result: Any) -> Tensor:
    """Return the loss in a forward's result.

    Raises:
        ModelError: there is no loss, or it is ambiguous.
    """
    if _is_summed(result):
        return result[0]  # type: ignore[no-any-return]
    found = result
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif isinstance(result, tuple | list):
        scalars = [one for one in result if torch.is_tensor(one) and one.dim() == 0]
        found = scalars[0] if len(scalars) == 1 else None
    elif not torch.is_tensor(result):
        found = getattr(result, "loss", None)
    if torch.is_tensor(found) and found.numel() == 1 and found.is_floating_point():
        return found.reshape(())
    raise ModelError(
        f"{type(model).__name__} returned {_describe_result(result)}, in which there is no loss",
        code="model-without-loss",
        fix="return a loss from forward, alone or as (logits, loss); or (summed loss, count); in "
        "Python `gpumix.prepare(loss=function(model, batch))` may return these two instead",
    )


def _describe_result(result: Any) -> str:
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"


def _as_tuple(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)
