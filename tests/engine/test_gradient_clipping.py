"""Clipping by the norm of all gradients, wherever they are."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    Share,
    assert_gradients_equal,
    batches,
    engine_for,
    initialised,
    joined,
    mean_loss,
    own_rows,
    pieces_of,
)

GPT2 = ARCHITECTURES["gpt2"]


def _clipped(shares, max_norm):
    engine = engine_for(GPT2.factory, shares)
    batch = next(batches(GPT2, sum(s.samples for s in shares), 1))
    engine.step(own_rows(batch, shares, engine.comm.rank))
    norm = engine.clip_grad_norm_(max_norm)
    return norm.item(), pieces_of(engine, gradients=True)


ALONE, UNEVEN = [Share(4, 2, 1)], [Share(2, 1, 1), Share(0, 0, 0), Share(2, 2, 5)]


@pytest.mark.parametrize(
    ("shares", "max_norm"),
    left_out(product((ALONE, UNEVEN), (0.01, 1e6)), [(UNEVEN, 1e6)]),
)
def test_the_norm_and_the_gradients_are_torchs(shares, max_norm):
    model = initialised(GPT2.factory)
    mean_loss(model, next(batches(GPT2, 4, 1))).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    alone = len(shares) == 1
    results = [_clipped(shares, max_norm)] if alone else run_ranks(_clipped, 3, shares, max_norm)
    assert [found for found, _ in results] == pytest.approx([norm.item()] * len(shares), rel=1e-5)
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    assert_gradients_equal(joined([pieces for _, pieces in results]), expected)
