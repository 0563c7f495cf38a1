"""Connections over IP: those to one port give up, those to a server of this process are seen."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from gpumix.train.processes.store import create_store
from gpumix.train.processes.tcp_connections import (
    WatchedConnection,
    has_visitors,
    listen_at,
    listen_for_watchers,
    set_connection_timeouts,
    wait_for_disconnects,
)
from helpers.processes.waiting import wait_until


def limits(connection: socket.socket) -> tuple[int, int]:
    tcp = socket.IPPROTO_TCP
    return (
        connection.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    )


@pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system bounds no connection"
)
def test_those_to_the_port_give_up():
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as another,
        socket.create_connection(one.getsockname()) as meant,
        socket.create_connection(another.getsockname()) as other,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        left, right = socket.socketpair()
        gc.collect()  # what earlier tests have left open
        before = sorted(Path("/dev/fd").iterdir())
        set_connection_timeouts(7.5, port=one.getsockname()[1])
        assert sorted(Path("/dev/fd").iterdir()) == before
        assert limits(meant) == (7500, 1)
        assert limits(other) == (0, 0)
        meant.sendall(b"still open")
        left.sendall(b"so are these")
        for each in (left, right, unnamed):
            each.close()


VISIT = """
import sys
import torch.distributed as dist
visit = dist.TCPStore("127.0.0.1", int(sys.argv[1]))
visit.set("here", "yes")
visit.get("here")
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.extended
def test_a_store_sees_when_all_others_have_left():
    """The process that has it is connected to it itself, which does not count. The other is
    connected once it was answered: before, its connection may wait to be accepted."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", VISIT, str(store.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as visitor:
        assert visitor.stdout is not None
        assert visitor.stdout.readline() == b"connected\n"
        assert is_waiting(store.port)
        visitor.kill()
        visitor.wait()
        assert not is_waiting(store.port)


def is_waiting(port: int, limit_s: float = 0.5) -> bool:
    """Whether a server of this process stays for as long as it may."""
    began = time.monotonic()
    wait_for_disconnects(port, limit_s=limit_s)
    return time.monotonic() - began >= limit_s


def test_a_store_at_one_address_is_not_visited_by_its_own_process():
    """Its own connection is of IPv6 at one end, and of IPv4 at the other."""
    with listen_at("127.0.0.1", 0, one_host=True) as server:
        port = server.getsockname()[1]
        store = create_store(server, "127.0.0.1")
    assert not has_visitors(port)
    guest = dist.TCPStore("127.0.0.1", port)  # of this process too
    assert not has_visitors(port)
    assert store.num_keys() == guest.num_keys()
    with socket.create_connection(("127.0.0.1", port)) as other:
        visit = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            pass_fds=[other.fileno()],
        )
        left = other.detach()
    os.close(left)  # now it is another process's alone
    wait_until(lambda: has_visitors(port), 10)  # before, it may wait to be accepted
    visit.communicate()
    wait_for_disconnects(port, limit_s=10)
    assert not has_visitors(port)


WATCHED = """
import sys
from gpumix.train.processes.tcp_connections import listen_for_watchers
watched = listen_for_watchers("127.0.0.1")
print(watched.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_process_is_there_until_it_is_gone():
    """Even if it is stopped; and who looks first when it is gone is told the same."""
    command = [sys.executable, "-c", WATCHED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watched:
        port = int(watched.stdout.readline())
        line = WatchedConnection("127.0.0.1", port)
        assert line.look(within_s=5) == "there"
        os.kill(watched.pid, signal.SIGSTOP)
        assert line.look(within_s=5) == "there"
        late = WatchedConnection("127.0.0.1", port)
        assert late.look(within_s=5) == "there"
        late.close()
        watched.kill()
        watched.wait()
        assert line.look(within_s=5) == "gone"
        assert WatchedConnection("127.0.0.1", port).look(within_s=5) == "gone"
        line.close()


def test_an_address_of_another_host_is_not_listened_at():
    assert listen_for_watchers("192.0.2.1") is None  # RFC 5737: of nobody
