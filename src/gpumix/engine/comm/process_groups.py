"""Collectives of all ranks, by their backend or staged through host memory."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.host_staged import StagedCommunicator
from gpumix.hardware.device import device_in_use
from gpumix.hardware.runtime import GPU_BACKENDS, current_device, get_gpu_type, is_available, is_gpu
from gpumix.schema.plan.plan import Collectives, Plan


def make_communicator(device: torch.device, forms: Collectives | None = None) -> Communicator:
    """Return collectives of the default process group for `device`; of one rank without a group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Communicator(None, rank=0, world=1, forms=forms, device=device)
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    kind = (
        StagedCommunicator if is_gpu(device) and not _has_gpu_backend(device.type) else Communicator
    )
    return kind(group, rank=rank, world=world, forms=forms, device=device)


def needs_gpu(plan: Plan) -> bool:
    """Return whether this process, still in no group, is to compute on a GPU."""
    opened = device_in_use()
    if opened is not None:
        return is_gpu(opened.torch_device)
    return is_available() and not plan.emulated


def get_own_device(plan: Plan) -> torch.device:
    """Return the device opened by this process, by default the current GPU or the CPU."""
    opened = device_in_use()
    if opened is not None:
        return opened.torch_device
    if is_available() and not plan.emulated and _has_gpu_backend(get_gpu_type()):
        return current_device()
    return torch.device("cpu")


def get_group_device() -> torch.device:
    """Return the device of tensors sent by the default process group: the current GPU with a GPU
    vendor's backend, else the host."""
    on_gpus = dist.is_initialized() and dist.get_backend() in GPU_BACKENDS.values()
    return current_device() if on_gpus else torch.device("cpu")


def group_timeout() -> timedelta | None:
    """Return the timeout of the default process group; None without a group."""
    group = dist.group.WORLD
    if group is None:
        return None
    found: timedelta = group._get_backend(get_group_device()).options._timeout
    return found


def _has_gpu_backend(kind: str) -> bool:
    """Return whether the default group takes GPU tensors; gloo has no uneven shares on GPUs."""
    found = str(dist.get_backend_config()) if dist.is_initialized() else ""
    return not found or f"{kind}:{GPU_BACKENDS[kind]}" in found
