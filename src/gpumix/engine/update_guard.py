"""Skips updates of bad steps on the device, without waiting on the host.

A step whose loss or gradient norm is not finite must not change weights and optimizer state. The
host learns of it a step later. Until then the optimizer's kernels skip the update themselves, by
the flag used for gradient scaling (`found_inf`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class UpdateGuard:
    """Skips all updates from the first bad step on.

    Args:
        device: device of gradients and weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._good = torch.zeros((), device=device)
        self._bad = torch.ones((), device=device)
        self._found = self._good

    def see(self, *values: torch.Tensor) -> None:
        """Record the loss or the gradient norm of a step before its update, without waiting."""
        for value in values:
            self._found = torch.where(torch.isfinite(value), self._found, self._bad)

    @contextmanager
    def over(self, optimizer: Optimizer) -> Iterator[None]:
        """Make steps of `optimizer` in the body change nothing if a bad value was seen. Requires
        `can_skip_updates`."""
        guarded: Any = optimizer
        guarded.found_inf = self._found
        try:
            yield
        finally:
            del guarded.found_inf


def can_skip_updates(optimizer: Optimizer) -> bool:
    """Return whether kernels of `optimizer` can skip a step, like those of torch's fused ones."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_first_momentum_step(optimizer: Optimizer) -> bool:
    """Return whether the next step of `optimizer` is a momentum parameter's first. Fused SGD then
    allocates the momentum, which a skipped step would leave uninitialized."""
    return isinstance(optimizer, SGD) and any(
        p.grad is not None and p not in optimizer.state
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
    )
