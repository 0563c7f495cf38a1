"""Connections over IP: those to one port give up, those to a server of this process are seen."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from gpumix.train.connections import give_up_after, wait_until_left


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
        before = sorted(Path("/dev/fd").iterdir())
        give_up_after(7.5, port=one.getsockname()[1])
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
    wait_until_left(port, limit_s=limit_s)
    return time.monotonic() - began >= limit_s
