"""Ranks that train as on a GPU: the results of a step are read when the next one was given."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import cuda_device
from gpumix.engine.engine import Engine
from gpumix.engine.update_guard import UpdateGuard
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Plan
from gpumix.train import async_steps, rank_tasks
from gpumix.train.async_steps import IssuedSteps
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.rank_setup.context import Task


def train(
    seat: RankAddress,
    task: Task,
    plan: Plan,
    devices: tuple[Device, ...],
    *settings: Any,
) -> list[float]:
    """The losses of a run, in one rank; `settings`: the ranks whose results are late, the number of
    the step that is bad, and whether the run goes on from a checkpoint."""
    late, bad_step, resume = settings
    _late(seat.rank in late)
    _bad_in(bad_step)
    return rank_tasks.train(seat, task, plan, None, devices, resume).losses


def waits(
    seat: RankAddress, task: Task, plan: Plan, devices: tuple[Device, ...]
) -> tuple[list[float], list[Counter[str]]]:
    """The losses of a run on the device for tests, in one rank, and by step where its main thread
    waited for the device between the batch's coming and the next one's."""
    give, found = IssuedSteps.give, []

    def counted(self: IssuedSteps, begins: Callable[[], float]) -> None:
        cuda_device.reset_host_waits()
        give(self, begins)
        found.append(cuda_device.host_waits())

    IssuedSteps.give = counted  # type: ignore[method-assign]
    return rank_tasks.train(seat, task, plan, None, devices, False).losses, found


def forked(seat: RankAddress) -> tuple[bool, bool, str]:
    """Of a rank that has not opened its device: whether CUDA was used before it was forked, or is
    used now, and by what torch asks whether there are GPUs."""
    asked = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    return torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized(), asked


def _late(late: bool) -> None:
    """A CPU's results are late too: its fused optimizers leave steps out as a GPU's do."""
    if late:
        async_steps._guard_of = lambda engine, optimizer: UpdateGuard(engine.device)


def _bad_in(bad_step: int | None) -> None:
    """In a step the gradients are not finite, after a loss that is."""
    norm_of = Engine.gradient_norm
    calls = 0

    def gradient_norm(self: Engine) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == bad_step:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(torch.inf)
        return norm_of(self)

    Engine.gradient_norm = gradient_norm  # type: ignore[method-assign]
