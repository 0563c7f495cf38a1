"""The store in which ranks find each other, as each of them reaches it."""

from __future__ import annotations

import atexit
import socket
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from gpumix.spec.errors import MachineError, first_line
from gpumix.train.connections import give_up_after, wait_until_left
from gpumix.train.launch import Seat

# How long a process that has the store stays for the others, when it ends before they do.
STAY_S = 10.0


def store_of(seat: Seat, timeout_s: float) -> dist.Store:
    """The rendezvous store, with the words of the seat's run. A process that has it itself keeps it
    until it ends, and ends after those that are connected to it.

    Raises:
        MachineError: it is not reached within the timeout.
    """
    if seat.holds_store:
        _keep(seat.host, seat.port)
    store = _connect(seat, timeout_s)
    give_up_after(timeout_s, port=seat.port)
    return dist.PrefixStore(seat.run, store)


def _connect(seat: Seat, timeout_s: float) -> dist.TCPStore:
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
            where=socket.gethostname(),
            why=first_line(error),
            fix=f"open port {seat.port} there, or name an address that all hosts reach: "
            "torchrun --rdzv-endpoint or --master-addr",
        ) from error


@cache
def _keep(host: str, port: int) -> dist.TCPStore:
    """In this process, from now on."""
    atexit.register(wait_until_left, port, limit_s=STAY_S)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
