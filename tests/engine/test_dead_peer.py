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
    begun = time.monotonic()
    try:
        engine.step(mine)
    except CommunicationError as error:
        return str(error), time.monotonic() - begun
    return None


@pytest.mark.parametrize("how, within_s", [("exit", 2.5), ("sleep", 4.5)])
def test_the_others_are_told(how, within_s):
    results = run_ranks(_step_without, 3, 1, how, timeout_s=8, group_timeout_s=3, mortal=[1])
    for rank in (0, 2):
        message, seconds = results[rank]
        assert "failed" in message
        assert "why:" in message
        assert seconds < within_s
