"""An engine that takes over how losses add up, in place of its first rehearsal."""

from __future__ import annotations

import json

import pytest
import torch
from test_additivity import ADDITIVE, a_batch, an_engine, cross_entropy
from test_loss_watch import LATER, now

from gpumix.engine.engine import Engine
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.rehearsal import additivity
from gpumix.engine.rehearsal.settled_reduction import SettledReduction
from helpers.errors import raises


def taking_over(losses: SettledReduction, loss) -> Engine:
    """An engine that knows from a file how losses add up."""
    engine = an_engine(loss)
    engine.assume(SettledReduction.from_json(json.loads(json.dumps(losses.to_json()))))
    return engine


@pytest.mark.parametrize("name", ADDITIVE)
def test_steps_are_the_same_without_the_rehearsal(name, monkeypatch):
    first = an_engine(ADDITIVE[name][0])
    assert first.settled_reduction is None
    expected = first.step(a_batch())
    again = taking_over(first.settled_reduction, ADDITIVE[name][0])
    monkeypatch.setattr(additivity, "rehearse", None)  # calling it is an error
    torch.testing.assert_close(again.step(a_batch()), expected, rtol=0, atol=0)
    for mine, other in zip(again.pieces(), first.pieces(), strict=True):
        torch.testing.assert_close(mine.local.grad, other.local.grad, rtol=0, atol=0)
    assert again.reduction == first.reduction
    assert again.settled_reduction == first.settled_reduction


def test_losses_are_watched_as_after_a_rehearsal():
    now.function = cross_entropy
    first = an_engine(now)
    first.step(a_batch())
    again = taking_over(first.settled_reduction, now)
    again.step(a_batch())
    now.function = LATER["a sum"]
    again.step(a_batch())
    with raises(ModelError, code="loss-changed-since-start"):
        again.step(a_batch())
