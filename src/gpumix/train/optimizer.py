"""The optimizer and the learning rate of a job."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gpumix.engine.shards import Piece
from gpumix.spec.job import Job, OptimizerSpec, ScheduleSpec


def optimizer_for(spec: OptimizerSpec, pieces: Iterable[Piece]) -> torch.optim.Optimizer:
    """The optimizer over a rank's pieces. Weight decay is for matrices: parameters of two and more
    dimensions in the whole model, whatever the shape of the piece."""
    trained = [p for p in pieces if p.local.requires_grad]
    matrices = [p.local for p in trained if len(p.shape) >= 2]
    others = [p.local for p in trained if len(p.shape) < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return _make(spec, [group for group in groups if group["params"]])


def trial_optimizer(spec: OptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same optimizer over any parameters, for the profiler to time."""
    return _make(spec, [{"params": parameters, "weight_decay": spec.weight_decay}])


def _make(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # Fused: one pass over memory, and no temporary of the size of the shard.
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def learning_rate(job: Job, step: int) -> float:
    """The learning rate of `step`, counted from 0."""
    return job.optimizer.lr * _factor(job.schedule, step, job.steps)


def _factor(schedule: ScheduleSpec, step: int, steps: int) -> float:
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    if schedule.kind == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    if schedule.kind == "constant":
        done = 0.0
    return 1.0 - (1.0 - schedule.final_ratio) * done
