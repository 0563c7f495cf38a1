"""The collectives of all ranks: those of their backend, or through memory of the host."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gpumix.engine.comm import Communicator
from gpumix.engine.staged import StagedCommunicator
from gpumix.hardware.device import device_in_use
from gpumix.hardware.runtime import (
    GPU_BACKENDS,
    current_device,
    is_available,
    is_gpu,
    kind,
)
from gpumix.spec.plan import Collectives, Plan


def all_ranks(device: torch.device, forms: Collectives | None = None) -> Communicator:
    """Of the default process group, for tensors on `device`; of one rank, if there is none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Communicator(None, rank=0, world=1, forms=forms, device=device)
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    kind = StagedCommunicator if is_gpu(device) and not _speaks_gpu(device.type) else Communicator
    return kind(group, rank=rank, world=world, forms=forms, device=device)


def on_gpu(plan: Plan) -> bool:
    """Whether this process is to compute on a GPU, while it is in no group yet."""
    opened = device_in_use()
    if opened is not None:
        return is_gpu(opened.torch_device)
    return is_available() and not plan.emulated


def own_device(plan: Plan) -> torch.device:
    """The device that this process has opened, else its current GPU, else the CPU."""
    opened = device_in_use()
    if opened is not None:
        return opened.torch_device
    if is_available() and not plan.emulated and _speaks_gpu(kind()):
        return current_device()
    return torch.device("cpu")


def device_of_group() -> torch.device:
    """Where tensors are that the default process group sends: this process's current GPU by its
    maker's backend, else the host."""
    on_gpus = dist.is_initialized() and dist.get_backend() in GPU_BACKENDS.values()
    return current_device() if on_gpus else torch.device("cpu")


def group_timeout() -> timedelta | None:
    """How long a rank waits for others in the default process group; None without one."""
    group = dist.group.WORLD
    if group is None:
        return None
    found: timedelta = group._get_backend(device_of_group()).options._timeout
    return found


def _speaks_gpu(kind: str) -> bool:
    """Whether the default group takes tensors on GPUs; gloo lacks what uneven shares need there."""
    found = str(dist.get_backend_config()) if dist.is_initialized() else ""
    return not found or f"{kind}:{GPU_BACKENDS[kind]}" in found
