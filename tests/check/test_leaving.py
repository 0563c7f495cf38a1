"""Of torchrun's processes none leaves before the first one has told what is wrong: the others would
have it ended unheard."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import torch.distributed as dist

from gpumix.check import run
from gpumix.check.probes.worker import STORE_PREFIX
from gpumix.hardware.host.environment import TorchrunPlace
from gpumix.schema.errors import InputError
from helpers.errors import raises

LIMIT_S = 60.0


def place(rank: int) -> TorchrunPlace:
    return TorchrunPlace(
        rank=rank,
        world=2,
        local_rank=rank,
        master_address="127.0.0.1",
        master_port=1,
        agent_has_store=True,
        elastic=False,
    )


def test_a_job_that_no_process_can_read(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(run, "connect_store", lambda seat, patience_s: store)

    def unreadable():
        raise InputError("there is no such job file", code="file-missing")

    found = []
    until = time.monotonic() + LIMIT_S
    other = threading.Thread(
        target=lambda: found.append(run._run_other_rank(place(1), unreadable, until))
    )
    leaving = ExitStack()
    other.start()
    with raises(InputError, code="file-missing"):
        run._run_first_rank(place(0), unreadable, until, print, leaving)
    store.wait([f"{STORE_PREFIX}/1/hello"])  # it has told what is wrong with it
    other.join(0.3)
    assert other.is_alive()
    leaving.close()
    other.join(LIMIT_S)
    assert found == [True]
