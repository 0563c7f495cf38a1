"""Clipping by the norm of all gradients, wherever they are."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from extended import left_out
from gpumix.schema.errors import InputError
from harness import run_ranks
from models import ARCHITECTURES
from reference import (
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


STEPS = 6
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


# -- without the engine ----------------------------------------------------------------------------


def by_engine(engine):
    engine.clip_grad_norm_(0.1)


def by_norm(engine):
    torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.1)


def by_value(engine):
    torch.nn.utils.clip_grad_value_(engine.parameters(), 0.001)


def by_name(engine):
    for name, piece in engine.named_parameters():
        if "wte" in name and piece.grad is not None:
            piece.grad *= 0.1


def by_a_schedule(engine):
    for piece in engine.parameters():
        if piece.grad is not None:
            piece.grad = piece.grad / (1 + engine.steps)


def in_one_process(change):
    """Losses of steps whose gradients `change` changes, as torch's clipping does."""
    model = initialised(GPT2.factory)
    model.steps = 0
    model.clip_grad_norm_ = partial(torch.nn.utils.clip_grad_norm_, [*model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for batch in batches(GPT2, 4, STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        model.steps += 1
        change(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def changed(shares, change, **settings):
    engine = engine_for(GPT2.factory, shares, **settings)
    optimizer = torch.optim.SGD(engine.parameters(), lr=1.0)
    losses = []
    for batch in batches(GPT2, 4, STEPS):
        optimizer.zero_grad()
        losses.append(engine.step(own_rows(batch, shares, engine.comm.rank)).item())
        change(engine)
        optimizer.step()
    return losses


def refused(shares, change):
    with pytest.raises(InputError) as caught:
        changed(shares, change)
    return str(caught.value)


@pytest.mark.parametrize("change", [by_engine, by_value, by_name, by_a_schedule])
def test_other_changes_of_gradients_are_as_in_one_process(change):
    for losses in run_ranks(changed, 3, UNEVEN, change):
        assert losses == pytest.approx(in_one_process(change), rel=1e-4)


def test_torchs_clipping_is_exact_where_every_rank_has_all_gradients():
    whole = [Share(1, 1, 1), Share(3, 3, 1)]
    for losses in run_ranks(partial(changed, zero_stage=0), 2, whole, by_norm):
        assert losses == pytest.approx(in_one_process(by_norm), rel=1e-4)


def test_torchs_clipping_of_pieces_is_refused_on_all_ranks():
    for told in run_ranks(refused, 3, UNEVEN, by_norm):
        assert "gradients were scaled by unlike factors before the update of step 2: " in told
        assert "engine.clip_grad_norm_(max_norm)" in told
