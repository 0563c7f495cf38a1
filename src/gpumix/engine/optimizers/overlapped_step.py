"""Optimizer step bucket by bucket, for each bucket as soon as its gradient is complete.

Updates overlap with the rest of the backward pass. Only for optimizers that update each element by
itself, and if nothing must be known of all gradients first (no clipping, no check for overflow).
State on the host is updated by a separate thread, while the device continues.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gpumix.engine.offload.copy_lanes import CopyLane, LaneMark
from gpumix.engine.optimizers.elementwise_check import has_any_parameter
from gpumix.engine.sharding.bucket import Bucket
from gpumix.engine.update_guard import UpdateGuard
from gpumix.hardware.memory_limit import count_as_host_memory

ELEMENTWISE_OPTIMIZERS = (Adam, AdamW, SGD)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if `optimizer` is known to update each element by itself."""
    return type(optimizer) in ELEMENTWISE_OPTIMIZERS


class HostStepHooks:
    """Hooks that count allocations by optimizer steps for parameters on the host as host memory,
    whoever calls the step.

    Args:
        owner: object whose lifetime the hooks share.
        parameters: parameters on the host.
    """

    def __init__(self, owner: object, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._on_host = frozenset(map(id, parameters))
        self._inside: list[ExitStack] = []
        for handle in (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ):
            weakref.finalize(owner, handle.remove)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if has_any_parameter(optimizer, self._on_host):
            while self._inside:  # of a step that failed
                self._inside.pop().close()
            self._inside.append(ExitStack())
            self._inside[-1].enter_context(count_as_host_memory())

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside and has_any_parameter(optimizer, self._on_host):
            self._inside.pop().close()


class OverlappedUpdates:
    """Steps of `optimizer` for one bucket after another.

    Attributes:
        guard: holds back the steps, if set.

    Args:
        arrivals: lane on which gradients come to the host, if the state is there.
    """

    def __init__(
        self, optimizer: Optimizer, buckets: Iterable[Bucket], *, arrivals: CopyLane | None
    ) -> None:
        self.optimizer = optimizer
        self.guard: UpdateGuard | None = None
        self._arrivals = arrivals
        self._thread = None if arrivals is None else ThreadPoolExecutor(1, "gpumix-update")
        self._under_way: list[Future[None]] = []
        self._members: dict[int, list[list[torch.nn.Parameter]]] = {}
        self._late: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for bucket in buckets:
            own = {id(piece.parameter) for piece in bucket.pieces}
            self._members[id(bucket)] = [
                [p for p in group["params"] if id(p) in own] for group in optimizer.param_groups
            ]

    def update(self, bucket: Bucket) -> None:
        """Update a bucket whose gradient is complete. Parameters without a gradient on this rank
        wait for `finish`, when the gradients of other ranks are known."""
        members = self._members[id(bucket)]
        unused = {name for group in bucket.trainable for name in group.unused}
        if unused:
            late = {piece.parameter for piece in bucket.pieces if piece.name in unused}
            for waiting, group in zip(self._late, members):
                waiting += [p for p in group if p in late]
            members = [[p for p in group if p not in late] for group in members]
        if any(members):
            self._update(members)

    def _update(self, members: list[list[torch.nn.Parameter]]) -> None:
        """Step for some parameters of each group, once their gradients have arrived."""
        if self._arrivals is None or self._thread is None:
            self._step(members)
            return
        arrived = self._arrivals.mark()  # gradients are on their way to the host
        self._under_way.append(self._thread.submit(self._step, members, arrived))

    def finish(self) -> None:
        """Wait for all updates, including late parameters: missing gradients are known now."""
        late, self._late = self._late, [[] for _ in self._late]
        if any(p.grad is not None for group in late for p in group):
            self._update(late)
        for one in self._under_way:
            one.result()
        self._under_way = []

    def _step(
        self, members: list[list[torch.nn.Parameter]], arrived: LaneMark | None = None
    ) -> None:
        if arrived is not None:
            arrived.wait()
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group, some in zip(groups, members):
            group["params"] = some
        try:
            with self.guard.over(self.optimizer) if self.guard is not None else nullcontext():
                self.optimizer.step()
        finally:
            for group, params in zip(groups, whole):
                group["params"] = params
