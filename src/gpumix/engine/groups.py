"""The collectives of all ranks: those of their backend, or through memory of the host."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gpumix.engine.comm import Communicator
from gpumix.engine.staged import StagedCommunicator
from gpumix.hardware.runtime import device_in_use, indexed
from gpumix.spec.plan import Collectives, Plan


def all_ranks(device: torch.device, forms: Collectives | None = None) -> Communicator:
    """Of the default process group, for tensors on `device`; of one rank, if there is none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Communicator(None, rank=0, world=1, forms=forms, device=device)
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    kind = StagedCommunicator if device.type == "cuda" and not _speaks_cuda() else Communicator
    return kind(group, rank=rank, world=world, forms=forms, device=device)


def on_gpu(plan: Plan) -> bool:
    """Whether this process is to compute on a GPU, while it is in no group yet."""
    opened = device_in_use()
    if opened is not None:
        return opened.torch_device.type == "cuda"
    return torch.cuda.is_available() and not plan.emulated


def own_device(plan: Plan) -> torch.device:
    """The device that this process has opened, else its current GPU, else the CPU."""
    opened = device_in_use()
    if opened is not None:
        return opened.torch_device
    if torch.cuda.is_available() and not plan.emulated and _speaks_cuda():
        return indexed("cuda")
    return torch.device("cpu")


def device_of_group() -> torch.device:
    """Where tensors are that the default process group sends: this process's current GPU by NCCL,
    else the host."""
    on_gpus = dist.is_initialized() and dist.get_backend() == "nccl"
    return indexed("cuda") if on_gpus else torch.device("cpu")


def group_timeout() -> timedelta | None:
    """How long a rank waits for others in the default process group; None without one."""
    group = dist.group.WORLD
    if group is None:
        return None
    found: timedelta = group._get_backend(device_of_group()).options._timeout
    return found


def _speaks_cuda() -> bool:
    """Whether the default group takes tensors on GPUs; gloo lacks what uneven shares need there."""
    return not dist.is_initialized() or "cuda:nccl" in str(dist.get_backend_config())
