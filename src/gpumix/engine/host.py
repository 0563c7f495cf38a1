"""Memory of the host, for what a device has no room for."""

from __future__ import annotations

import torch

from gpumix.hardware.memory import host_memory


def empty_on_host(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of the host, pinned if `device` copies to it by itself."""
    with host_memory():
        return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
