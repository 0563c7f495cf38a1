"""Connections to one port give up; all others, of whatever kind, are left as they are."""

from __future__ import annotations

import socket

import pytest

from gpumix.train.unheard import give_up_after

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system bounds no connection"
)


def limits(connection: socket.socket) -> tuple[int, int]:
    tcp = socket.IPPROTO_TCP
    return (
        connection.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
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
        give_up_after(7.5, port=one.getsockname()[1])
        assert limits(meant) == (7500, 1)
        assert limits(other) == (0, 0)
        meant.sendall(b"still open")
        left.sendall(b"so are these")
        for each in (left, right, unnamed):
            each.close()
