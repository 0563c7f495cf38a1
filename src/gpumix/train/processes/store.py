"""Rendezvous store of the ranks, as reached by each rank."""

from __future__ import annotations

import atexit
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from gpumix.engine.comm.heartbeat import STOPPED_TIMEOUT_S
from gpumix.hardware.host.environment import restrict_to_loopback
from gpumix.schema.errors import MachineError, get_first_line
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.processes.tcp_connections import (
    listen_at,
    set_connection_timeouts,
    wait_for_disconnects,
)

# How long the process with the store stays for the others at its end.
LINGER_S = 10.0
LOOK_S = 0.05
RETRY_S = 2.0  # until a store that does not answer is looked up again


def connect_store(seat: RankAddress, timeout_s: float) -> dist.Store:
    """Connect to the rendezvous store, with keys of the seat's run. A process with the store keeps
    it until the end, and ends after the processes connected.

    Raises:
        MachineError: no connection within the timeout.
    """
    if seat.one_host:
        restrict_to_loopback()
    if seat.holds_store:
        _serve_store(seat.host, seat.port, one_host=seat.one_host)
    store = _connect(seat, timeout_s)
    set_connection_timeouts(min(timeout_s, STOPPED_TIMEOUT_S), port=seat.port)
    return dist.PrefixStore(seat.run, store)


def leave_store(seat: RankAddress, start: int) -> None:
    """Leave the store before the `start`th restart of all processes. The process with the store
    waits until no rank needs it."""
    store = dist.PrefixStore("leaving", _connect(seat, LINGER_S))
    store.set(f"{start}/{seat.rank}", "")
    deadline = time.monotonic() + (LINGER_S if seat.holds_store else 0.0)
    keys = [f"{start}/{rank}" for rank in range(seat.world)]
    while time.monotonic() < deadline and not all(store.check([key]) for key in keys):
        time.sleep(LOOK_S)


def wait_for_restarted_store(seat: RankAddress, start: int, timeout_s: float) -> None:
    """Wait for the store of a restart, after `leave_store`. The store may have ended with its
    process, and starts with it again.

    Raises:
        MachineError: no store within the timeout.
    """
    key, deadline = f"began/{start}", time.monotonic() + timeout_s
    if seat.rank == 0:
        connect_store(seat, timeout_s).set(key, "")
        return
    while time.monotonic() < deadline:
        with suppress(MachineError, RuntimeError):
            if connect_store(seat, RETRY_S).check([key]):
                return
        time.sleep(LOOK_S)
    raise MachineError(
        f"rank {seat.rank} does not find the run that all ranks have begun anew",
        code="restarted-run-not-found",
        where=socket.gethostname(),
        fix="look at what rank 0 says",
    )


def _connect(seat: RankAddress, timeout_s: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            seat.host,
            seat.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise MachineError(
            f"rank {seat.rank} does not reach the first host at {seat.host}:{seat.port}",
            code="first-host-not-reachable",
            where=socket.gethostname(),
            why=get_first_line(error),
            fix=f"open port {seat.port} there, or name an address that all hosts reach: "
            "torchrun --local-addr or --master-addr",
        ) from error


@cache
def _serve_store(host: str, port: int, *, one_host: bool) -> dist.TCPStore:
    """Create the store in this process, until the process ends."""
    store = create_listening_store(host, port, one_host=one_host)
    atexit.register(wait_for_disconnects, port, limit_s=LINGER_S)
    return store


def create_listening_store(host: str, port: int, *, one_host: bool) -> dist.TCPStore:
    """Create a store listening at the given address; torch alone listens at all addresses of the
    host.

    Raises:
        MachineError: listening fails, or remote ranks could not connect.
    """
    with listen_at(host, port, one_host=one_host) as server:
        return create_store(server, host)


def create_store(server: socket.socket, host: str) -> dist.TCPStore:
    """Create the store of a run on a listening socket; the store lives as long as the object."""
    return dist.TCPStore(
        host,
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(server.fileno()),
    )
