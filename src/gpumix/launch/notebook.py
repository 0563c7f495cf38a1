"""Training from a notebook: a function runs in one process for each device of this host.

Processes are forked, so that functions and values of the notebook need not be importable. A GPU
that the notebook itself uses cannot be used by them, which is an error told before.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gpumix.hardware.host.environment import CLUSTER, use_settings
from gpumix.launch.orders import Orders
from gpumix.launch.ranks import host_launcher
from gpumix.launch.ranks.host_ranks import HostAssignment, RankProcess
from gpumix.profiler.api import announce_cpu_ranks
from gpumix.schema.errors import GpumixError, InputError, MachineError, TrainingError

GRACE_S = 60.0  # to save in, after the notebook's Stop


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_processes: int | None = None,
    cluster: str | Path | None = None,
) -> None:
    """Call `function(*args)` in a process for each device, and wait for all to end.

    Args:
        function: may be defined in the notebook; it makes its Trainer or Accelerator itself.
        num_processes: default: as many as there are devices.
        cluster: a cluster file; default: the GPUs of this host.

    Raises:
        InputError: the cluster has another number of devices.
        MachineError: this process already uses a GPU, or cannot fork.
        TrainingError: a process failed; its traceback was printed.
    """
    _check_can_fork()
    processes = _count_processes(num_processes, cluster)
    share = HostAssignment(0, processes, processes, host_launcher.LOOPBACK, 0)
    if cluster is not None:
        use_settings({CLUSTER: str(Path(cluster).absolute())})

    def start(number: int, env: Mapping[str, str]) -> RankProcess:
        return ForkedRank(number, function, args, env)

    orders = Orders()
    with orders.take_signals():
        code, told = host_launcher.run_started_ranks(share, start, orders, grace_s=GRACE_S)
    if code:
        raise TrainingError(
            f"training from the notebook failed: {told}",
            code="notebook-training-failed",
            fix="the first traceback printed above says why; run the cell again when it is mended",
        )


class ForkedRank(RankProcess):
    """Rank that calls a function in a copy of this process."""

    def __init__(
        self,
        number: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        env: Mapping[str, str],
    ) -> None:
        super().__init__(number)
        self._process = get_context("fork").Process(target=_run, args=(function, args, env))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()


def _run(function: Callable[..., Any], args: Sequence[Any], env: Mapping[str, str]) -> None:
    """Be a rank: call the function, print its error, leave with its exit code."""
    os.setsid()
    use_settings(env)
    code = 0
    try:
        announce_cpu_ranks()
        function(*args)
    except GpumixError as error:
        code = error.exit_code
        sys.stderr.write(f"gpumix: {error}\n")
    except BaseException:
        code = TrainingError.exit_code
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the notebook's libraries are not there to be ended


def _check_can_fork() -> None:
    if not hasattr(os, "fork"):
        raise MachineError(
            "this system cannot fork processes",
            code="fork-unavailable",
            fix="write the function to a file, and start that: gpumix launch train.py",
        )
    from gpumix.hardware.runtime import is_initialized

    if is_initialized():
        raise MachineError(
            "this notebook already uses a GPU, so that other processes cannot",
            code="notebook-uses-gpu",
            why="CUDA was initialised, by a model or tensor on a GPU or by torch.cuda calls",
            fix="restart the kernel, and leave everything on GPUs to the launched function",
        )


def _count_processes(asked: int | None, cluster: str | Path | None) -> int:
    """Return the number of processes, equal to the devices."""
    from gpumix.hardware.discovery.discover import discover_cluster
    from gpumix.schema.reading.read import read_cluster

    if cluster is None:
        return asked or len(discover_cluster().devices)
    devices = len(read_cluster(Path(cluster)).devices)
    if asked not in (None, devices):
        raise InputError(
            f"the cluster has {devices} devices, and num_processes is {asked}",
            code="process-count-mismatch",
            where=str(cluster),
        )
    return devices
