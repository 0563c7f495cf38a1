"""What others can connect to: loopback, or the interface that was named, and never all of them."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from gpumix.hardware.host import environment
from gpumix.hardware.host.environment import restrict_to_loopback
from gpumix.schema.errors import MachineError
from gpumix.train.processes.local_launcher import LOOPBACK, RankAddress
from gpumix.train.processes.store import connect_store
from gpumix.train.processes.torchrun_runner import NO_DEVICE
from helpers.extended import every_second
from helpers.processes.harness import run_ranks
from helpers.processes.ports import free_port

SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ELSEWHERE = "127.0.0.2"  # loopback too, and another address than LOOPBACK


def _seat(host: str, **changes: object) -> RankAddress:
    seat = RankAddress(0, 1, NO_DEVICE, free_port(), host=host, holds_store=True)
    return replace(seat, **changes)


def _answers(host: str, port: int) -> bool:
    try:
        dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=1))
    except dist.DistNetworkError:
        return False
    return True


def _reached_at(host: str) -> list[bool]:
    seat = _seat(host)
    connect_store(seat, 5.0).set("word", "here")
    return [_answers(at, seat.port) for at in (LOOPBACK, ELSEWHERE)]


@pytest.mark.parametrize(
    ("host", "reached"), every_second([(LOOPBACK, [True, False]), (ELSEWHERE, [False, True])])
)
def test_a_store_listens_where_it_was_said_alone(host, reached):
    assert run_ranks(_reached_at, 1, host) == [reached]


def _refused(host: str, **changes: object) -> tuple[str, str]:
    with pytest.raises(MachineError) as caught:
        connect_store(_seat(host, **changes), 5.0)
    return caught.value.what, caught.value.fix


def test_what_other_hosts_cannot_reach_is_refused(monkeypatch):
    """As /etc/hosts of Debian has it."""
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: here)
    what, fix = _refused("host-a", one_host=False)
    assert "is told to the others as host-a, which is 127.0.1.1 here" in what
    assert "--local-addr" in fix


@pytest.mark.parametrize("host", [LOOPBACK, "localhost"])
def test_who_says_that_all_are_here_is_believed(host):
    assert run_ranks(_told, 1, host) == ["here"]


def _told(host: str) -> str:
    store = connect_store(_seat(host, one_host=False), 5.0)
    store.set("word", "here")
    return store.get("word").decode()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_of_this_host_is_told(host):
    what, _ = _refused(host)
    assert f"cannot listen at {host}" in what


def test_ranks_of_one_host_talk_on_loopback(monkeypatch):
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # what is set inside is taken back in the end
        monkeypatch.delenv(name)
    restrict_to_loopback()
    assert [os.environ[name] for name in SETTINGS] == ["lo", "lo"]
    monkeypatch.setenv(SETTINGS[0], "eth7")
    restrict_to_loopback()
    assert os.environ[SETTINGS[0]] == "eth7"


def test_where_there_is_no_loopback_nothing_is_set(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "LOOPBACKS", ())
    restrict_to_loopback()
    assert not set(SETTINGS) & set(os.environ)
