"""Processes that benchmarks fork, which have imported what the caller has, and their results."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

GRACE_S = 5.0  # for the other ranks, when one has ended with an error


def launched(rank: int, world: int, port: int) -> None:
    """Let this process look as if a launcher had started it."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip


def fork(
    function: Callable[[], Any], path: Path, *, lead: bool = False, limit_s: float = 600.0
) -> int:
    """A process that writes what a function returns; of an error the traceback.

    Args:
        lead: whether it begins a process group.
        limit_s: after which a leader ends, should the caller be killed outright.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        if lead:
            os.setpgid(0, 0)
            signal.alarm(int(limit_s))
        torch.set_num_threads(1)
        log = os.open(path.with_name(path.name + ".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        payload = pickle.dumps(function())
        part = path.with_name(path.name + ".part")
        part.write_bytes(payload)
        part.rename(path)
    except BaseException:
        path.write_bytes(pickle.dumps({"status": "broken", "why": traceback.format_exc()}))
    finally:
        os._exit(0)


def wait_for(pids: Sequence[int], limit_s: float, *, together: bool = False) -> None:
    """Until all have ended; whoever has not by then is killed.

    Args:
        together: when one has ended, the others get `GRACE_S`.
    """
    end, left = time.monotonic() + limit_s, list(pids)
    while left and time.monotonic() < end:
        ended = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]]
        left = [pid for pid in left if pid not in ended]
        if ended and together:
            end = min(end, time.monotonic() + GRACE_S)
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def result_of(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def packed(error: BaseException) -> BaseException:
    """The error, or its text where it cannot cross to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def last_line(error: BaseException) -> str:
    """Where an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
