"""Launcher of a host's ranks, run by `gpumix launch` or by hand:

    python -m gpumix.launch.ranks.host_launcher --first-rank 4 --processes 2 --world 6 \\
        --address host-a --port 29500 -- train.py ARGUMENTS

The host of rank 0 serves the rendezvous store of the ranks, at that address and no other.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gpumix.hardware.host.environment import restrict_to_loopback, unbuffer_output
from gpumix.launch.commands import HOST_MODULE, LOST_EXIT_CODE
from gpumix.launch.orders import Order, Orders
from gpumix.launch.ranks.host_ranks import (
    HostAssignment,
    ProgramRank,
    RankProcess,
    StartRank,
    start_ranks,
    wait_for_ranks,
)
from gpumix.schema.errors import GpumixError
from gpumix.train.processes.tcp_connections import has_visitors, listen_at

LOOPBACK = "127.0.0.1"
STORE_KEPT_S = 300.0  # time the first host keeps the store for ranks elsewhere
NAME_RESOLUTION_S = 60.0  # time until the name of a new pod or host is known
POLL_S = 0.1


def run_host_ranks(
    share: HostAssignment,
    words: Sequence[str],
    orders: Orders,
    *,
    grace_s: float,
    take: Callable[[int, str], None] | None = None,
) -> tuple[int, str]:
    """Run a program on this host's ranks to the end; see `run_started_ranks`.

    Args:
        words: arguments of each rank's interpreter.
        take: gets each line of the ranks with 1 or 2 for their stdout or stderr; by default they
            share this process's output.
    """
    if take is not None:
        unbuffer_output()

    def start(number: int, env: Mapping[str, str]) -> RankProcess:
        return ProgramRank(number, words, env, take)

    return run_started_ranks(share, start, orders, grace_s=grace_s)


def run_started_ranks(
    share: HostAssignment, start: StartRank, orders: Orders, *, grace_s: float
) -> tuple[int, str]:
    """Run this host's ranks to the end; return the exit code of the first to fail, with a
    description.

    Args:
        share: its port may be 0 on a single host: any free port.

    Raises:
        MachineError: the store cannot listen at its address.
    """
    if share.one_host:
        restrict_to_loopback()
    server = _open_server(share) if share.first == 0 else None
    if server is not None:
        share = HostAssignment(
            share.first, share.processes, share.world, share.address, server.getsockname()[1]
        )
    with start_ranks(share, start, grace_s=grace_s) as ranks:
        orders.listen()
        store = _serve(server, share) if server is not None else None
        code, told = wait_for_ranks(ranks, orders, grace_s=grace_s)
    if store is not None and code == 0:
        _keep_store(share.port, orders)
    return code, told


def _open_server(share: HostAssignment) -> socket.socket:
    deadline = time.monotonic() + NAME_RESOLUTION_S
    while time.monotonic() < deadline:
        with suppress(socket.gaierror):
            socket.getaddrinfo(share.address, None)
            break
        time.sleep(POLL_S)
    return listen_at(share.address, share.port, one_host=share.one_host)


def _serve(server: socket.socket, share: HostAssignment) -> object:
    """Serve the store; ranks connecting earlier wait, as the port is open."""
    from gpumix.train.processes.store import create_store

    with server:
        return create_store(server, share.address)


def _keep_store(port: int, orders: Orders) -> None:
    """Keep the store until the ranks of all hosts have disconnected."""
    deadline = time.monotonic() + STORE_KEPT_S
    while time.monotonic() < deadline and orders.given is Order.CONTINUE and has_visitors(port):
        time.sleep(POLL_S)


def main() -> None:
    asked = _parse_arguments()
    orders = Orders(led=asked.led)
    share = HostAssignment(
        asked.first_rank, asked.processes, asked.world, asked.address, asked.port
    )
    with orders.take_signals():
        try:
            take = print_line if asked.led else None
            code, told = run_host_ranks(
                share, asked.program, orders, grace_s=asked.grace_period, take=take
            )
        except GpumixError as error:
            code, told = error.exit_code, str(error)
    if code and not orders.given:
        print_line(2, f"gpumix: {told}")
    sys.stdout.flush()
    os._exit(1 if code == LOST_EXIT_CODE else code)  # threads reading pipes may hang


def print_line(to: int, line: str) -> None:
    """Print a complete line, ignoring a missing reader."""
    with suppress(OSError):
        data = f"{line}\n".encode(errors="replace")
        while data:
            data = data[os.write(to, data) :]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {HOST_MODULE}")
    numbers = {
        "--first-rank": "of this host",
        "--processes": "that run here, one for each device",
        "--world": "how many ranks there are in all",
        "--port": "of the first host, where ranks find each other",
    }
    for name, text in numbers.items():
        parser.add_argument(name, type=int, required=True, help=text)
    parser.add_argument("--address", required=True, help="of the first host, as others reach it")
    parser.add_argument(
        "--grace-period", type=float, default=60.0, help="seconds to save in, when stopped"
    )
    parser.add_argument("--led", action="store_true", help="orders come by standard input")
    parser.add_argument("program", nargs="+", help="script or -m module, and its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    main()
