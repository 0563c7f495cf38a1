"""Joins the ranks of a launcher, for a program that makes no process group itself.

Otherwise each process of a `torchrun` would train by itself, all with equal losses, without any
notice.
"""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import suppress
from functools import cache

import torch.distributed as dist

from gpumix.engine.comm.communicator import leave_groups
from gpumix.hardware import runtime
from gpumix.hardware.host.environment import TorchrunPlace, torchrun_place, world_size
from gpumix.schema.errors import InputError

OPEN_AGENTS_WARNING = (
    "torchrun's agents listen on all addresses of their hosts, and with c10d, their default on one "
    "host, read pickles: who reaches them can run code. `gpumix launch` has none, and with "
    "--rdzv-backend gpumix --rdzv-endpoint HOST:PORT they do neither"
)
LEAVE_TIMEOUT_S = 5.0  # wait for other ranks at the end; a failed rank never comes


def ensure_process_group(*, on_gpus: bool) -> None:
    """Make the default process group, if several processes were started and this process is in no
    group. The group is left when the program ends, once all ranks are there: a gloo rank that does
    not leave may be killed by its threads, and a rank that leaves early may kill others.

    Args:
        on_gpus: each process uses the GPU of its local rank, which becomes the current GPU.

    Raises:
        InputError: there are several processes without a rendezvous; or no GPU is left for this
            process.
    """
    warn_of_open_agents()
    if world_size() == 1 or dist.is_initialized():
        return
    place = torchrun_place()
    if place is None:
        raise InputError(
            f"WORLD_SIZE is {world_size()}, and this process is in no process group",
            code="no-process-group",
            where="environment",
            why="RANK, LOCAL_RANK, MASTER_ADDR or MASTER_PORT is missing, so it cannot join one",
            fix="start it with torchrun, or call torch.distributed.init_process_group before",
        )
    if on_gpus:
        _set_local_gpu(place)
    dist.init_process_group(runtime.GPU_BACKENDS[runtime.get_gpu_type()] if on_gpus else "gloo")
    register_leave_at_exit()


@cache
def warn_of_open_agents() -> None:
    """Warn once, on the first rank, if torchrun's agents can be reached from anywhere."""
    place = torchrun_place()
    if place is not None and place.rank == 0 and place.agents_open and not place.starts:
        with suppress(OSError):  # stderr is closed
            sys.stderr.write(f"{OPEN_AGENTS_WARNING}\n")


@cache
def register_leave_at_exit() -> None:
    """Leave the default process group when the program ends, independent of its creator."""
    atexit.register(_leave_with_all_ranks)


def _set_local_gpu(place: TorchrunPlace) -> None:
    if place.local_rank >= runtime.device_count():
        raise InputError(
            f"process {place.local_rank} of this host has no GPU of its own",
            code="process-without-gpu",
            why=f"the host has {runtime.device_count()}",
            fix="give torchrun at most as many --nproc-per-node as the host has GPUs",
        )
    runtime.set_device(place.local_rank)


def _leave_with_all_ranks() -> None:
    if not dist.is_initialized() or hasattr(sys, "last_type"):  # it ends by an error
        return
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    # The store is the launcher's; if it is gone, so are the other ranks.
    with suppress(RuntimeError):
        there = store.add("gpumix/leaving", 1)
        while there < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.01)
            there = store.add("gpumix/leaving", 0)
    leave_groups()
