"""Losses of models whose rule is known here, so that engines need not rehearse their first step."""

from __future__ import annotations

from torch import nn

from gpumix.engine.loss.objective import make_objective
from gpumix.engine.loss.reduction import SUM_AND_COUNT, ObjectiveWithRule, ReductionRule


def known_loss(model: nn.Module) -> ObjectiveWithRule:
    """The objective of one of `models.ARCHITECTURES`: transformers computes means over labels,
    which decoders shift. Padding is cut off where it may be."""
    objective = make_objective(model, rule_of(model))
    objective.trims = objective.may_trim
    return objective


def rule_of(model: nn.Module) -> ReductionRule:
    loss = getattr(model, "loss_function", None)
    if loss is None:
        return SUM_AND_COUNT
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    shifts = getattr(loss, "__name__", "") == "ForCausalLMLoss" and not encoder_decoder
    return ReductionRule("a mean over 'labels'", "labels", "labels", shifted=shifts)
