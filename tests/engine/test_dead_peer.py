"""A rank that dies is an error on the others, in time."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from gpumix.engine.comm import CommunicationError
from gpumix.spec.errors import GpumixError
from harness import run_ranks
from models import ARCHITECTURES
from reference import Share, batches, engine_for, own_rows

GPT2 = ARCHITECTURES["gpt2"]
SHARES = [Share(2, 1, 1), Share(2, 1, 2), Share(1, 1, 1)]


def _step_without(dead, how):
    engine = engine_for(GPT2.factory, SHARES)
    mine = own_rows(next(batches(GPT2, 5, 1)), SHARES, engine.comm.rank)
    engine.step(mine)
    if engine.comm.rank == dead:
        if how == "exit":
            os._exit(1)
        time.sleep(60)
    try:
        engine.step(mine)
    except CommunicationError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "how, group_timeout_s",
    [
        pytest.param("exit", 60, id="at once, of one that is gone"),
        pytest.param("sleep", 2, id="at the end of the timeout, of one that hangs"),
    ],
)
def test_the_others_are_told(how, group_timeout_s):
    """Before the harness ends them."""
    results = run_ranks(
        _step_without, 3, 1, how, timeout_s=20, group_timeout_s=group_timeout_s, mortal=[1]
    )
    for rank in (0, 2):
        assert "failed" in results[rank]
        assert "why:" in results[rank]


def _steps_after_a_failure():
    """Rank 1 fails in the middle of a step, and everybody goes on regardless."""

    def loss(model, batch):
        result = model(**batch)
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        return result.loss, torch.tensor(1)

    shares = SHARES[:2]
    engine = engine_for(GPT2.factory, shares, loss=loss)
    mine = own_rows(next(batches(GPT2, 4, 1)), shares, engine.comm.rank)
    said = []
    for _ in range(2):
        try:
            engine.step(mine)
        except (ValueError, GpumixError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_after_a_failed_step_there_is_no_other():
    """The ranks' collectives would not meet: gloo ends the process then."""
    of_0, of_1 = run_ranks(_steps_after_a_failure, 2, group_timeout_s=2)
    assert of_0[0].startswith("CommunicationError")
    assert of_1[0] == "ValueError: bad batch"
    for first, second in (of_0, of_1):
        assert second.startswith("TrainingError: an earlier step failed")
        assert first.split(":")[0] in second
