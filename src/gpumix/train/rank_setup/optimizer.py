"""Optimizer and learning rate of a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gpumix.engine.optimizers.adafactor import Adafactor
from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
from gpumix.engine.optimizers.layout import OptimizerLayout
from gpumix.engine.optimizers.muon import Muon
from gpumix.engine.optimizers.parameter_groups import match_names
from gpumix.engine.sharding.shard import Piece
from gpumix.schema.job.job import Job, LrSchedulerSpec, OptimizerSpec, ParameterGroup


def build_optimizer(
    spec: OptimizerSpec,
    pieces: Iterable[Piece],
    layout: Callable[[], OptimizerLayout] | None = None,
    *,
    names: Sequence[str] | None = None,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """Return the optimizer over a rank's shards. Weight decay applies to matrices: parameters with
    two or more dimensions in the full model, whatever the shape of the shard.

    Args:
        layout: returns the engine's layout; called, on all ranks, if the optimizer needs it.
        names: of all trained parameters, if ranks train different parameters.
        fused: whether adamw and sgd update in one kernel.

    Raises:
        InputError: a group of the job matches no parameter.
    """
    trained = [p for p in pieces if p.local.requires_grad]
    patterns = [group.match for group in spec.groups]
    numbers = match_names(patterns, [p.name for p in trained], names)
    made: dict[tuple[int, bool], dict[str, Any]] = {}
    for piece, number in zip(trained, numbers):
        of_job = spec.groups[number] if number < len(spec.groups) else None
        matrix = len(piece.shape) >= 2
        made.setdefault((number, not matrix), _make_parameter_group(spec, of_job, matrix=matrix))[
            "params"
        ].append(piece.parameter)
    # torch requires a group, even on a rank whose stage trains nothing.
    groups = [made[key] for key in sorted(made)] or [_make_parameter_group(spec, None, matrix=True)]
    return _construct_optimizer(spec, groups, layout, fused=fused)


def _make_parameter_group(
    spec: OptimizerSpec, of_job: ParameterGroup | None, *, matrix: bool
) -> dict[str, Any]:
    decay = spec.weight_decay if matrix else 0.0
    rate = spec.lr
    if of_job is not None:
        decay = decay if of_job.weight_decay is None else of_job.weight_decay
        rate = of_job.lr or rate
    # torch's schedulers use `initial_lr` too.
    return {"params": [], "weight_decay": decay, "lr": rate, "initial_lr": rate}


def build_trial_optimizer(
    spec: OptimizerSpec, parameters: list[nn.Parameter], *, fused: bool = True
) -> torch.optim.Optimizer:
    """Return the optimizer over full parameters, for the profiler to time."""
    groups = [{"params": parameters, "weight_decay": spec.weight_decay}]
    return _construct_optimizer(spec, groups, None, fused=fused)


def _construct_optimizer(
    spec: OptimizerSpec,
    groups: list[dict[str, Any]],
    layout: Callable[[], OptimizerLayout] | None,
    *,
    fused: bool,
) -> torch.optim.Optimizer:
    given = layout() if layout is not None and spec.name in ("adafactor", "muon") else None
    # Fused: one pass over memory, no temporary of the shard's size.
    adamw: dict[str, Any] = {"betas": spec.betas, "eps": spec.eps}
    make: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": partial(torch.optim.AdamW, **adamw, fused=fused),
        "adamw_8bit": partial(AdamW8bit, **adamw),
        "sgd": partial(torch.optim.SGD, momentum=spec.momentum or 0.0, fused=fused),
        "adafactor": partial(
            Adafactor,
            layout=given,
            beta2_decay=spec.beta2_decay,
            eps=(None, spec.least_scale),
            d=spec.clip_threshold,
        ),
        "muon": partial(
            Muon,
            layout=given,
            momentum=0.95 if spec.momentum is None else spec.momentum,
            nesterov=spec.nesterov,
            ns_steps=spec.ns_steps,
            adjust_lr_fn=spec.adjust_lr,
            **adamw,
        ),
    }
    return make[spec.name](groups, lr=spec.lr)


def compute_learning_rate(job: Job, step: int) -> float:
    """Return the learning rate of `step`, counted from 0."""
    return job.optimizer.lr * _compute_schedule_factor(job.lr_scheduler, step, job.max_steps)


def set_learning_rates(optimizer: torch.optim.Optimizer, job: Job, step: int) -> None:
    """Set the learning rates of `step`: one schedule, scaled by each group's peak."""
    factor = _compute_schedule_factor(job.lr_scheduler, step, job.max_steps)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def _compute_schedule_factor(schedule: LrSchedulerSpec, step: int, steps: int) -> float:
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    # A trial may take more steps than the job.
    done = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    if schedule.type == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    if schedule.type == "constant":
        done = 0.0
    return 1.0 - (1.0 - schedule.min_lr_ratio) * done
