"""A unit that is called several times: gathered per run of calls, reduced once."""

from __future__ import annotations

import pytest
import torch

from helpers.training.models import VOCABULARY, WIDTH, InOrder, masked_lm, model_of, vectors
from helpers.training.reference import (
    Share,
    assert_ranks_step_plainly,
    assert_step_is_plain,
    engine_alone,
    expected_counts,
)


def albert():
    return model_of(
        "AutoModelForMaskedLM",
        "AlbertConfig",
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )()


ALBERT_LAYER = "albert.encoder.albert_layer_groups.0"


ORDERS = [[0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0], [0, 1, 2, 1, 0]]


def engine_in(order, samples=4, micro_batch=3):
    blocks = max(order) + 1
    calls = [f"blocks.{number}" for number in order]
    return engine_alone(lambda: InOrder(blocks, order), samples, micro_batch, calls=calls)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_all_calls_add_up(order):
    batch = vectors(4, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_in(order), lambda: InOrder(max(order) + 1, order), batch)


@pytest.mark.parametrize(
    "order, gathers, reductions",
    [([0, 0, 0], 1 + 1, 2), ([0, 1, 0, 1], 1 + 7, 3), ([0, 1, 1, 0], 1 + 5, 3)],
)
def test_collectives(order, gathers, reductions):
    engine = engine_in(order)
    before = engine.comm.counts.copy()
    engine.step(vectors(4, torch.Generator().manual_seed(0)))
    found = dict(engine.comm.counts - before)
    assert found == {"gather": gathers, "reduce": reductions, "exchange": 1}
    assert found == expected_counts(engine)


def test_albert_shares_one_block():
    shares, batch = [Share(3, 2, 2), Share(2, 1, 1)], masked_lm(5, torch.Generator().manual_seed(0))
    calls = [ALBERT_LAYER] * 3
    assert_ranks_step_plainly(albert, shares, batch, units=[ALBERT_LAYER], calls=calls)
