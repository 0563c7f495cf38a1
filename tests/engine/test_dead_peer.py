"""A rank that dies is an error on the others, in time."""

from __future__ import annotations

import os
import time

import pytest

from gpumix.engine.comm import CommunicationError
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
