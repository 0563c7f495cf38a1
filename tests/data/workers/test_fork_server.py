"""Worker processes, and what is sent to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumix.data.workers.fork_server import SMALL_BYTES, ForkServer, Inbox, can_fork, send_message
from helpers.extended import every_second
from helpers.processes.waiting import wait_until

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are processes on Linux alone")
PATIENCE_S = 20


def echo(inbox: Inbox) -> None:
    while True:
        send_message(inbox.connection, inbox.receive())


def slow(inbox: Inbox) -> None:
    time.sleep(0.2)
    echo(inbox)


@pytest.fixture(params=[echo, slow])
def nursery(request) -> Iterator[ForkServer]:
    found = ForkServer(request.param)
    yield found
    found.close()


@pytest.mark.parametrize(
    "size", every_second([SMALL_BYTES - 100, 1, SMALL_BYTES + 100, 50 * SMALL_BYTES])
)
def test_messages_come_in_order_whether_they_are_waited_for_or_not(nursery, size):
    worker = nursery.fork()
    for number in range(4):
        worker.send((number, bytes(size)))
        if size > SMALL_BYTES or number % 2:  # so that neither end waits for the other
            assert worker.connection.poll(PATIENCE_S)
            assert worker.connection.recv()[1] == bytes(size)
    left = [worker.connection.recv()[0] for _ in range(2)] if size <= SMALL_BYTES else []
    assert left in ([], [2, 3])
    worker.close()


def test_a_worker_ends_with_its_connection(nursery):
    worker = nursery.fork()
    worker.send("here")
    assert worker.connection.poll(PATIENCE_S) and worker.connection.recv() == "here"
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    worker.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files - 2
    stat = Path(f"/proc/{worker.pid}/stat")
    wait_until(lambda: " Z " in stat.read_text(), PATIENCE_S)
    assert nursery.end(worker) == "it left with 0"
    with pytest.raises(OSError, match="it is gone"):
        worker.send("to nobody")
