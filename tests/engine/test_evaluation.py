"""An evaluation: the loss without dropout; training goes on as if it had not been."""

from __future__ import annotations

import pytest
import torch

from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, bert, gpt2, mean_loss, packed_lm, t5
from helpers.training.reference import (
    Share,
    batches,
    engine_alone,
    engine_for,
    initialised,
    own_rows,
    pieces_of,
)

GPT2 = ARCHITECTURES["gpt2"]


@pytest.mark.parametrize(
    "factory, name", [(gpt2(0.3), "gpt2"), (bert(0.3), "bert"), (t5(0.3), "t5")]
)
def test_the_loss_is_that_of_the_model_in_evaluation_mode(factory, name):
    batch = next(batches(ARCHITECTURES[name], 5, 1))
    with torch.no_grad():
        expected = mean_loss(initialised(factory).eval(), batch).item()
    engine = engine_alone(factory, 5, 2)
    assert engine.evaluate(batch).item() == pytest.approx(expected, rel=1e-5)


def test_modes_of_all_modules_stay():
    engine = engine_alone(GPT2.factory, 2, 1)
    engine.model.transformer.h[1].eval()
    before = [m.training for m in engine.model.modules()]
    engine.evaluate(next(batches(GPT2, 2, 1)))
    assert [m.training for m in engine.model.modules()] == before


def test_any_number_of_samples_may_be_evaluated():
    engine = engine_alone(GPT2.factory, 2, 2)
    batch = next(batches(GPT2, 7, 1))
    with torch.no_grad():
        expected = mean_loss(initialised(GPT2.factory).eval(), batch).item()
    assert engine.evaluate(batch).item() == pytest.approx(expected, rel=1e-5)


def train(engine, evaluate: bool):
    batch = packed_lm(4, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(engine.step(batch).item())
        if evaluate:
            engine.evaluate(batch)
        optimizer.step()
        if evaluate:
            engine.evaluate(batch)
    return losses, pieces_of(engine)


def test_training_is_the_same_with_evaluations_between():
    without, with_them = (train(engine_alone(gpt2(0.2), 4, 2), flag) for flag in (False, True))
    assert without[0] == with_them[0]
    for mine, other in zip(without[1], with_them[1]):
        assert (mine[3] == other[3]).all()


def _evaluate(shares):
    engine = engine_for(GPT2.factory, shares)
    batch = next(batches(GPT2, sum(s.samples for s in shares), 1))
    return engine.evaluate(own_rows(batch, shares, engine.comm.rank)).item()


@pytest.mark.extended
def test_all_ranks_learn_the_loss_of_all():
    shares = [Share(3, 2, 1), Share(0, 0, 2), Share(2, 1, 0)]
    with torch.no_grad():
        batch = next(batches(GPT2, 5, 1))
        expected = mean_loss(initialised(GPT2.factory).eval(), batch).item()
    assert run_ranks(_evaluate, 3, shares) == pytest.approx([expected] * 3, rel=1e-5)
