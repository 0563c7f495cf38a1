"""What transformers models collect from inside their units: it reaches the loss with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.training.models import causal_model, packed_lm
from helpers.training.reference import (
    assert_gradients_equal,
    assert_step_is_plain,
    engine_alone,
    initialised,
    joined,
    pieces_of,
)


def mixtral(**settings):
    return causal_model(
        "MixtralConfig",
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        **settings,
    )


def test_the_balancing_loss_of_experts():
    batch = packed_lm(4, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(mixtral(), 4, 4), mixtral(), batch)


def test_the_balancing_loss_is_defined_per_micro_batch():
    batch = packed_lm(5, torch.Generator().manual_seed(0))
    model = initialised(mixtral())
    for rows, weight in ((slice(0, 3), 3 / 5), (slice(3, 5), 2 / 5)):
        (model(**{k: v[rows] for k, v in batch.items()}).loss * weight).backward()
    engine = engine_alone(mixtral(), 5, 3)
    engine.step(batch)
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    assert_gradients_equal(joined([pieces_of(engine, gradients=True)]), expected)


@pytest.mark.parametrize("what", ["attentions", "hidden_states"])
def test_attentions_and_hidden_states(what):
    factory = mixtral(attn_implementation="eager", **{f"output_{what}": True})
    batch = packed_lm(2, torch.Generator().manual_seed(0))

    def penalised(model, batch):
        result = model(**batch)
        values = getattr(result, what)
        assert len(values) == (3 if what == "attentions" else 4)
        return result.loss + sum(v.square().sum() for v in values), torch.tensor(1)

    model = initialised(factory)
    penalised(model, batch)[0].backward()
    engine = engine_alone(factory, 2, 2, loss=penalised)
    engine.step(batch)
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    assert_gradients_equal(joined([pieces_of(engine, gradients=True)]), expected)


def test_evaluation_collects_too():
    batch = packed_lm(4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = initialised(mixtral()).eval()(**batch).loss.item()
    assert np.isclose(engine_alone(mixtral(), 4, 4).evaluate(batch).item(), expected, rtol=1e-5)
