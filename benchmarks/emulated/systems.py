"""The systems that are compared: DDP, FSDP2, gpumix, and a device by itself.

All train the same model from the same weights with fused AdamW in fp32. A system is made on every
rank, inside the open emulated device; `step` does all of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gpumix
from emulated.setting import Setting
from gpumix.hardware.device import DeviceRuntime
from gpumix.spec.cut import split_micro_batches
from gpumix.spec.plan import Plan

LEARNING_RATE = 1e-3

Batch = dict[str, torch.Tensor]


class System(Protocol):
    """`samples` by rank; `step` gives this rank's part of the global batch's loss."""

    samples: tuple[int, ...]

    def step(self, batch: Batch) -> torch.Tensor: ...


class Plain:
    """An ordinary training loop around a model that may be wrapped.

    Args:
        averaged: whether gradients are averaged over ranks (and losses so), not summed.
        micro_batch: the most samples at once; default: all in one pass.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        samples: tuple[int, ...],
        *,
        averaged: bool,
        micro_batch: int | None = None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self.samples = samples
        self._model = model
        self._part = 1 / len(samples) if averaged else 1.0
        self._labels = setting.labels(setting.global_batch) * self._part
        self._micro_batch = micro_batch
        self._after_backward = after_backward
        self._optimizer = optimizer_of(list(model.parameters()))

    def step(self, batch: Batch) -> torch.Tensor:
        samples = len(batch["input_ids"])
        total = torch.zeros(())
        begin = 0
        for size in split_micro_batches(samples, self._micro_batch or samples):
            part = {name: rows[begin : begin + size] for name, rows in batch.items()}
            loss = self._model(**part, num_items_in_batch=self._labels).loss
            loss.backward()
            self._after_backward()
            total += loss.detach()
            begin += size
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total * self._part


class Gpumix:
    """The engine by a plan."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.samples = tuple(worker.samples for worker in plan.workers)
        self._engine = gpumix.prepare(model, plan)
        self._optimizer = optimizer_of(list(self._engine.parameters()))

    def step(self, batch: Batch) -> torch.Tensor:
        loss = self._engine.step(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss / len(self.samples)


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def alone(setting: Setting) -> Plain:
    """A device by itself on its part of the batch: no other rank takes part."""
    model = recomputing(setting.build())
    return Plain(model, setting, setting.proportional(), averaged=False)


def ddp(setting: Setting, runtime: DeviceRuntime) -> Plain:
    """DDP with equal batches. What ends its backward waits in C++, where pacing cannot see it."""
    model = recomputing(setting.build())
    return Plain(
        DistributedDataParallel(model, gradient_as_bucket_view=True),
        setting,
        setting.even(),
        averaged=True,
        after_backward=runtime.idle,
    )


def fsdp(
    model: Any,
    setting: Setting,
    samples: tuple[int, ...],
    *,
    recompute: bool = True,
    micro_batch: int | None = None,
    prefetch: bool = True,
) -> Plain:
    """FSDP2: every block a unit, and the rest.

    Equal batches: mean losses and averaged gradients, as everybody uses it. Unequal ones: summed
    losses over the global number of labels and summed gradients, which alone is right. `prefetch`
    is faster and takes more memory; CPUs have no streams, so FSDP2 must be told.
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    if recompute:
        recomputing(model)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if prefetch:
        model._set_unshard_async_op(True)
        for module, following in pairwise([model, *model.transformer.h]):
            module.set_modules_to_forward_prefetch([following])
    averaged = len(set(samples)) == 1
    if not averaged:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return Plain(model, setting, samples, averaged=averaged, micro_batch=micro_batch)


def recomputing(model: Any) -> Any:
    """Make each block keep only its input, and compute again what its backward needs."""
    for block in model.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model
