"""Runs a function on several ranks of one machine, quickly, and leaves no process behind.

Ranks are forked from a server that has imported what they need, so four of them start and meet in
0.2 s. Functions and arguments are pickled: they live at the top of a module; what they return is
plain Python or numpy (a tensor would need its maker alive).
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from cuda_device import current_lag, set_lag
from gpumix.engine.comm.communicator import CommunicationError
from helpers.processes import rank_server

# A rank that fails takes its peers along: so long, they may tell of it before they are killed.
GRACE_S = 2.0

_CONTEXT = multiprocessing.get_context("forkserver")


class RankDied(RuntimeError):
    """A rank ended, or was killed at the end of its time, without a result."""


class RankTraceback(Exception):
    """The traceback of an error in a rank: the cause of the error that the caller sees."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
    mortal: Collection[int] = (),
    backend: str = "gloo",
) -> list[Any]:
    """`function(*args)` on `world` ranks of a group on loopback; the results in rank order.

    A single rank gets no group, as a user without a launcher has none.

    Args:
        timeout_s: after it all ranks are killed.
        group_timeout_s: how long a collective waits for the other ranks.
        mortal: ranks that may die, or hang, without a result; theirs is None.
        backend: of the group; with nccl rank r is on GPU r.

    Raises:
        RankDied: a rank that is not mortal died, or time is up.
        Exception: what a rank raised, with the rank's traceback as its cause.
    """
    rank_server.warm_up()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = (world, store.port, backend, group_timeout_s, timeout_s, current_lag())
    ranks: dict[Connection, int] = {}
    processes: list[ForkServerProcess] = []
    try:
        for rank in range(world):
            here, there = _CONTEXT.Pipe(duplex=False)
            ranks[here] = rank
            process = _CONTEXT.Process(
                target=_rank_main, args=(there, rank, meeting, function, args), daemon=True
            )
            process.start()
            processes.append(process)
            there.close()
        return _results(ranks, processes, time.monotonic() + timeout_s, frozenset(mortal))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for connection in ranks:
            connection.close()
        del store


def _results(
    ranks: dict[Connection, int],
    processes: list[ForkServerProcess],
    deadline: float,
    mortal: frozenset[int],
) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    errors: list[BaseException] = []
    waiting = dict(ranks)
    while not mortal.issuperset(waiting.values()):
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                failed, payload = _received(connection)
            except EOFError:
                processes[rank].join(GRACE_S)
                if rank not in mortal:
                    code = processes[rank].exitcode
                    errors.append(RankDied(f"rank {rank} died with exit code {code}"))
                continue
            if failed:
                error, text = payload
                error.__cause__ = RankTraceback(text)
                errors.append(error)
            else:
                results[rank] = payload
        if errors:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if errors:
        # That a peer is gone is what the others see of a rank's own error.
        raise min(errors, key=lambda e: isinstance(e, (CommunicationError, RankDied)))
    late = sorted(set(waiting.values()) - mortal)
    if late:
        raise RankDied(f"rank(s) {late} did not end in time")
    return results


def _received(connection: Connection) -> tuple[bool, Any]:
    failed, payload = connection.recv()
    return failed, pickle.loads(payload)


def _rank_main(
    pipe: Connection,
    rank: int,
    meeting: tuple[int, int, str, float, float, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    world, port, backend, group_timeout_s, timeout_s, lag = meeting
    # Should the caller be killed outright, nobody else would end this process.
    signal.alarm(int(timeout_s) + 5)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    failed = False
    try:
        if lag:
            set_lag(lag)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if world > 1:
            dist.init_process_group(
                backend,
                store=dist.TCPStore("127.0.0.1", port, is_master=False),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=group_timeout_s),
            )
        payload = pickle.dumps(function(*args))
    except BaseException as error:
        failed, payload = True, _packed(error)
    pipe.send((failed, payload))
    pipe.close()
    # Without the group's teardown, which waits for peers; the pipe is the only thing to flush.
    os._exit(0)


def _packed(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error that cannot cross: its text can
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return pickle.dumps((error, text))
