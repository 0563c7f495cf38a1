"""Holds back the updates of bad steps on the device, so that the host need not look first.

A step whose loss or gradient norm is not finite must not change weights and optimizer states. The
host learns of it a step later; until then the optimizer's kernels themselves leave everything as it
is, by the flag that they take for gradient scaling (`found_inf`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class Guard:
    """Holds back all updates from the first bad step on.

    Args:
        device: the one on which gradients and weights are.
    """

    def __init__(self, device: torch.device) -> None:
        self._good = torch.zeros((), device=device)
        self._bad = torch.ones((), device=device)
        self._found = self._good

    def see(self, *values: torch.Tensor) -> None:
        """Take in the loss or the gradient norm of a step, before its update; nothing is waited
        for."""
        for value in values:
            self._found = torch.where(torch.isfinite(value), self._found, self._bad)

    @contextmanager
    def over(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, steps of `optimizer` change nothing if a bad value was seen. It must be one that
        `takes_guard`."""
        guarded: Any = optimizer
        guarded.found_inf = self._found
        try:
            yield
        finally:
            del guarded.found_inf


def takes_guard(optimizer: Optimizer) -> bool:
    """Whether the kernels of `optimizer` can leave a step out: those of torch's fused ones."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def makes_momentum(optimizer: Optimizer) -> bool:
    """Whether the next step of `optimizer` is the first one of some parameter that has momentum:
    fused SGD makes room for it then, which a step that is left out would leave unwritten."""
    return isinstance(optimizer, SGD) and any(
        p.grad is not None and p not in optimizer.state
        for group in optimizer.param_groups
        if group["momentum"]
        for p in group["params"]
    )
