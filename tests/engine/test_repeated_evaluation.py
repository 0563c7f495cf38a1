"""Evaluations that call the model more often than a training step does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpumix.schema.errors import GpumixError
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.reference import Share, batches, engine_for, initialised, own_rows
from helpers.training.staging import EVERY, LLAMAS_ENDS

# The third rank has no samples, and the second one several micro-batches.
SHARES = [Share(2, 2, 2), Share(3, 1, 1), Share(0, 0, 1)]
LLAMA = EVERY["llama"]
ENDS: dict[str, Any] = {"stage": LLAMAS_ENDS}


def twice(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = batch["input_ids"]
    return model(input_ids=tokens).logits - model(input_ids=tokens.flip(1)).logits


def once(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["input_ids"]).logits


def evaluated(functions: list[Any], settings: dict[str, Any]) -> list[list[np.ndarray]]:
    engine = engine_for(LLAMA.factory, SHARES, **settings)
    [batch] = batches(LLAMA, 5, 1)
    own = own_rows(batch, SHARES, engine.comm.rank)
    engine.step(own)
    found = []
    for function in functions:
        found.append([one.numpy() for one in engine.outputs(function, own).values()])
        engine.step(own)
    return found


@pytest.mark.parametrize(
    "settings",
    left_out(
        [{"zero_stage": 3} | ENDS, {"zero_stage": 0} | ENDS, {"zero_stage": 2}, {"zero_stage": 3}],
        [{"zero_stage": 2}, {"zero_stage": 3}],
    ),
    ids=lambda settings: f"{settings['zero_stage']} {'ends' * ('stage' in settings)}",
)
def test_a_model_called_twice_gives_its_own_outputs(settings):
    model = initialised(LLAMA.factory).eval()
    [batch] = batches(LLAMA, 5, 1)
    ranks = run_ranks(evaluated, 3, [twice, once, twice], settings)
    for place, function in enumerate([twice, once, twice]):
        with torch.no_grad():
            expected = function(model, batch)
        found = np.concatenate([part for rank in ranks for part in rank[place]])
        np.testing.assert_allclose(found, expected, atol=1e-5)


def refused() -> str:
    with pytest.raises(GpumixError) as error:
        evaluated([once, twice], {"zero_stage": 0})
    return str(error.value)


def test_a_later_evaluation_that_is_the_first_to_call_it_twice_is_refused():
    for said in run_ranks(refused, 3):
        assert "units that are called behind" in said
        assert "call the model as often as a training step does" in said
