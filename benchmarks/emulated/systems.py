"""The systems that are compared: DDP, FSDP2, gpumix, and a device by itself.

All run the same model from the same weights with activation recompute and fused AdamW in fp32.
A system is made on every rank, inside the open emulated device; `step` does all of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gpumix
from emulated.setting import Setting
from gpumix.hardware.runtime import DeviceRuntime
from gpumix.spec.plan import Plan, split_micro_batches

LEARNING_RATE = 1e-3

Batch = dict[str, torch.Tensor]


class System(Protocol):
    """`samples` by rank; `step` gives this rank's part of the global batch's loss."""

    samples: tuple[int, ...]

    def step(self, batch: Batch) -> torch.Tensor: ...


class Plain:
    """An ordinary training loop around a model that may be wrapped.

    Args:
        labels: what summed losses are divided by: the labels of the global batch where gradients
            are summed over ranks, those of one rank where they are averaged.
        micro_batch: the most samples at once; default: all in one pass.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: tuple[int, ...],
        *,
        labels: int,
        micro_batch: int | None = None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self.samples = samples
        self.model = model
        self.labels = labels
        self.micro_batch = micro_batch
        self.after_backward = after_backward
        self.optimizer = optimizer_of(list(model.parameters()))

    def step(self, batch: Batch) -> torch.Tensor:
        samples = len(batch["input_ids"])
        total = torch.zeros(())
        begin = 0
        for size in split_micro_batches(samples, self.micro_batch or samples):
            part = {name: rows[begin : begin + size] for name, rows in batch.items()}
            loss = self.model(**part, num_items_in_batch=self.labels).loss
            loss.backward()
            self.after_backward()
            total += loss.detach()
            begin += size
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Gpumix:
    """The engine by a plan."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.samples = tuple(worker.samples for worker in plan.workers)
        self.engine = gpumix.prepare(model, plan)
        self.optimizer = optimizer_of(list(self.engine.parameters()))

    def step(self, batch: Batch) -> torch.Tensor:
        loss = self.engine.step(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss / self.engine.comm.world


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def alone(setting: Setting, rank: int, *, early_stop: bool = True) -> Plain:
    """This rank's device by itself, on its share of the batch: no other rank takes part."""
    samples = setting.proportional()
    model = _recomputing(setting.build(), early_stop=early_stop)
    return Plain(model, samples, labels=setting.labels(samples[rank]))


def ddp(setting: Setting, runtime: DeviceRuntime, *, early_stop: bool = True) -> Plain:
    """DDP with equal batches; what ends its backward waits in C++, where pacing cannot see it."""
    samples = setting.even()
    model = _recomputing(setting.build(), early_stop=early_stop)
    return Plain(
        DistributedDataParallel(model, gradient_as_bucket_view=True),
        samples,
        labels=setting.labels(samples[0]),
        after_backward=runtime.idle,
    )


def fsdp(
    model: nn.Module,
    setting: Setting,
    samples: tuple[int, ...],
    *,
    micro_batch: int | None = None,
    early_stop: bool = True,
) -> Plain:
    """FSDP2: every block a unit, and the rest.

    Equal batches: a mean loss and averaged gradients, as everybody uses it. Unequal ones: summed
    losses over the global number of labels, and summed gradients, the only right way.
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    _recomputing(model, early_stop=early_stop)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if len(set(samples)) == 1:
        labels = setting.labels(samples[0])
        return Plain(model, samples, labels=labels, micro_batch=micro_batch)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    labels = setting.labels(setting.global_batch)
    return Plain(model, samples, labels=labels, micro_batch=micro_batch)


def _recomputing(model: nn.Module, *, early_stop: bool) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False, "early_stop": early_stop})
    return model.train()
