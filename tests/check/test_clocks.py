"""How far clocks of hosts are apart, as ranks tell it through a store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import gpumix
from gpumix.check.probes import worker
from gpumix.check.probes.probe import RankProbe
from gpumix.check.probes.requests import RankClients
from gpumix.check.survey import Surveyor
from helpers.devices.healthy import rank_of

LIMIT_S = 20.0


@pytest.fixture
def skews(monkeypatch):
    """By the rank, how far the clock is ahead that it reads."""
    ahead_s: dict[str, float] = {}

    def now() -> float:
        return time.time() + ahead_s.get(threading.current_thread().name, 0.0)

    clock = SimpleNamespace(time=now, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(worker, "time", clock)
    # Nobody is asked what it takes a process to know.
    monkeypatch.setattr(worker._Process, "start", lambda self, patience_s: "")
    return ahead_s


@pytest.mark.parametrize("ahead_s", [7.0, -7.0, 0.0])
def test_the_clock_of_another_host_is_read(skews, ahead_s):
    skews["2"] = ahead_s
    store = dist.HashStore()
    until = time.monotonic() + LIMIT_S
    hosts = ["host-a", "host-a", "host-b"]
    ranks = [
        worker.TaskServer(
            SimpleNamespace(rank=rank),
            None,
            store,
            hello=rank_of(rank, host=host, gpumix=gpumix.__version__),
            make=RankProbe,
        )
        for rank, host in enumerate(hosts)
    ]
    threads = [
        threading.Thread(target=one.serve, args=(until,), name=str(rank), daemon=True)
        for rank, one in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    crew = RankClients(store, len(ranks), until)
    surveyor = Surveyor(crew, None, lambda _: None)
    surveyor._meet()
    (clock,) = surveyor._clocks()
    crew.dismiss(range(len(ranks)), failed=False)
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert clock.host == "host-b" and clock.give_or_take_s > 0
    assert abs(clock.ahead_s - ahead_s) <= clock.give_or_take_s + 1e-6
