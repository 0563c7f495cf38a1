"""Ranks that train as on a GPU: the results of a step are read when the next one was given."""

from __future__ import annotations

from typing import Any

import torch

from gpumix.engine.engine import Engine
from gpumix.engine.guard import Guard
from gpumix.spec.cluster import Device
from gpumix.spec.plan import Plan
from gpumix.train import steps, work
from gpumix.train.context import Task
from gpumix.train.launch import Seat


def train(
    seat: Seat,
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
    return work.train(seat, task, plan, None, devices, resume).losses


def _late(late: bool) -> None:
    """A CPU's results are late too: its fused optimizers leave steps out as a GPU's do."""
    if late:
        steps._guard_of = lambda engine, optimizer: Guard(engine.device)


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
