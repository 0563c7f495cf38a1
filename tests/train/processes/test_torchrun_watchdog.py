"""What a rank under torchrun says when the store does not answer any more, or another host."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpumix.engine.comm.heartbeat import STOPPED_TIMEOUT_S, SilenceDetector
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import GpumixError, RankLost
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.processes.tcp_connections import Presence, WatchedConnection
from gpumix.train.processes.torchrun_runner import Arrival
from gpumix.train.processes.torchrun_watchdog import TorchrunWatchdog

DEVICES = [Device(id=f"gpu-{host}", device_class="gpu", host=host) for host in "ab"]
ARRIVALS = [
    Arrival(host, 0, f"agent-{host}", f"10.0.0.{n}", port=30000) for n, host in enumerate("ab", 1)
]
WHY = "it has not answered for 20 s"


@pytest.fixture
def said(monkeypatch) -> list[GpumixError]:
    found: list[GpumixError] = []
    monkeypatch.setattr(TorchrunWatchdog, "_end", lambda _, error: found.append(error))
    return found


def of_rank_1(monkeypatch, found: Presence) -> TorchrunWatchdog:
    """That of a rank that finds the other one's process so."""
    monkeypatch.setattr(WatchedConnection, "look", lambda self, *, within_s: found)
    return TorchrunWatchdog(RankAddress(1, 2, DEVICES[1], 29500), ARRIVALS, DEVICES, print)


def test_a_host_that_does_not_answer_either_is_named(monkeypatch, said):
    of_rank_1(monkeypatch, "without answer")._end_without_store(WHY)
    (error,) = said
    assert isinstance(error, RankLost)
    assert (error.where, error.device) == ("rank 1 (device 'gpu-b' on b)", "gpu-a")
    assert error.what == "rank 0 (device 'gpu-a' on a) stopped answering"
    assert "host a (10.0.0.1) does not answer" in error.why
    assert "--resume" in error.fix


@pytest.mark.parametrize("found", ["there", "gone"])
def test_else_it_is_the_process_that_has_it(monkeypatch, said, found):
    of_rank_1(monkeypatch, found)._end_without_store(WHY)
    (error,) = said
    assert error.what == "the process that holds the ranks together is gone"
    assert error.why == WHY


@pytest.mark.parametrize("found", ["there", "gone", "without answer"])
def test_another_host_whose_heart_stands_still_is_looked_for(monkeypatch, said, found):
    """The rank and its agent may have been killed while its host goes on."""
    of_rank = of_rank_1(monkeypatch, found)
    told: dict[str, str] = {}
    looks = iter(range(60))

    def passed(seconds: float) -> bool:
        """A second between two looks, as if it had passed."""
        clock.now += seconds
        return bool(told) or next(looks, None) is None

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(SilenceDetector.__init__, "__defaults__", (lambda: clock.now,))
    of_rank._over = SimpleNamespace(wait=passed, is_set=lambda: False)
    store: Any = SimpleNamespace(
        get=lambda key: b"7 1", check=lambda keys: keys == ["beat/0"], set=told.__setitem__
    )
    of_rank._look(store)
    if found == "there":
        assert not said and not told and clock.now > 3 * STOPPED_TIMEOUT_S
        return
    (error,) = said
    assert isinstance(error, RankLost)
    assert error.device == "gpu-a"
    assert error.what == "rank 0 (device 'gpu-a' on a) stopped answering"
    assert error.why == (
        "nothing was heard of it for 20 s, and "
        + {
            "gone": "the system of host a (10.0.0.1) says that the process is gone",
            "without answer": "host a (10.0.0.1) does not answer",
        }[found]
    )
    assert error.what in told["failed/1"]


def test_hosts_are_asked_at_once(monkeypatch, said):
    """Each takes seconds not to answer."""
    devices = [Device(id=f"gpu-{n}", device_class="gpu", host=f"host-{n}") for n in range(4)]
    arrivals = [
        Arrival(d.host, 0, d.host, f"10.0.0.{n}", port=n + 1) for n, d in enumerate(devices)
    ]
    together = threading.Barrier(3)

    def look(line: WatchedConnection, *, within_s: float) -> Presence:
        together.wait(within_s)
        return "there" if line.address == ("10.0.0.1", 2) else "without answer"

    monkeypatch.setattr(WatchedConnection, "look", look)
    TorchrunWatchdog(
        RankAddress(3, 4, devices[3], 29500), arrivals, devices, print
    )._end_without_store(WHY)
    (error,) = said
    assert error.what == (
        "rank 0 (device 'gpu-0' on host-0) and rank 2 (device 'gpu-2' on host-2) stopped answering"
    )
