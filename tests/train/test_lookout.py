"""What a rank under torchrun says when the store does not answer any more."""

from __future__ import annotations

import threading

import pytest

from gpumix.spec.cluster import Device
from gpumix.spec.errors import GpumixError, RankLost
from gpumix.train import lookout
from gpumix.train.launch import Seat
from gpumix.train.lookout import Lookout
from gpumix.train.torchrun import Arrival

DEVICES = [Device(id=f"gpu-{host}", device_class="gpu", host=host) for host in "ab"]
ARRIVALS = [Arrival(host, 0, f"agent-{host}", f"10.0.0.{n}") for n, host in enumerate("ab", 1)]
WHY = "it has not answered for 20 s"


@pytest.fixture
def said(monkeypatch) -> list[GpumixError]:
    found: list[GpumixError] = []
    monkeypatch.setattr(Lookout, "_end", lambda _, error: found.append(error))
    return found


def without_store(monkeypatch, answering: bool) -> None:
    """Rank 1 finds the store, on the other rank's host, without an answer."""
    monkeypatch.setattr(lookout, "answers", lambda address, port, within_s: answering)
    Lookout(Seat(1, 2, DEVICES[1], 29500), ARRIVALS, DEVICES, print)._without_store(WHY)


def test_a_host_that_does_not_answer_either_is_named(monkeypatch, said):
    without_store(monkeypatch, answering=False)
    (error,) = said
    assert isinstance(error, RankLost)
    assert (error.where, error.device) == ("rank 1 (device 'gpu-b' on b)", "gpu-a")
    assert error.what == "rank 0 (device 'gpu-a' on a) stopped answering"
    assert "host a (10.0.0.1) does not answer" in error.why
    assert "--resume" in error.fix


def test_else_it_is_the_process_that_has_it(monkeypatch, said):
    without_store(monkeypatch, answering=True)
    (error,) = said
    assert error.what == "the process that holds the ranks together is gone"
    assert error.why == WHY


def test_hosts_are_asked_at_once(monkeypatch, said):
    """Each takes seconds not to answer."""
    devices = [Device(id=f"gpu-{n}", device_class="gpu", host=f"host-{n}") for n in range(4)]
    arrivals = [Arrival(d.host, 0, d.host, f"10.0.0.{n}") for n, d in enumerate(devices)]
    together = threading.Barrier(3)

    def answers(address: str, port: int, *, within_s: float) -> bool:
        together.wait(within_s)
        return address == "10.0.0.1"

    monkeypatch.setattr(lookout, "answers", answers)
    Lookout(Seat(3, 4, devices[3], 29500), arrivals, devices, print)._without_store(WHY)
    (error,) = said
    assert error.what == (
        "rank 0 (device 'gpu-0' on host-0) and rank 2 (device 'gpu-2' on host-2) stopped answering"
    )
