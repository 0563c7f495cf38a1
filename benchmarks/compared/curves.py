"""Loss curves of the engine on uneven ranks, and of a single process.

In fp32 the truth is a plain loop. In other precisions it is FSDP2 in a group of one,
with a mixed precision policy: it computes on copies of fp32 weights in another
dtype and adds gradients up in fp32, as the engine does, and its code is torch's own; for fp16
`torch.amp.GradScaler` goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gpumix
from compared.setting import Batch, Model
from compared.systems import OnEngine
from emulated.rounds import joined
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.engine.engine import Engine
from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE, LossScaler
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.splitting import split_micro_batches
from gpumix.schema.plan.stage import ComputeDtype, Stage, Worker
from gpumix.train.processes.local_launcher import RankAddress, launch

Optimizers = list[torch.optim.Optimizer]
WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Share:
    """One rank's part of each step."""

    samples: int
    micro_batch: int
    state_share: float


@dataclass(frozen=True)
class Case:
    """A precision and an optimizer. `theirs` makes the optimizers of a whole model, `ours` that of
    an engine; both are functions at the top of a module."""

    name: str
    model: Model
    shares: tuple[Share, ...]
    theirs: Callable[[nn.Module], Optimizers]
    ours: Callable[[Engine], torch.optim.Optimizer]
    dtype: ComputeDtype = "fp32"

    @property
    def global_batch(self) -> int:
        return sum(share.samples for share in self.shares)

    def batch(self, step: int) -> Batch:
        return self.model.rows(step * self.global_batch, self.global_batch)

    def plan(self, model: nn.Module) -> Plan:
        anatomy = split_into_units(model)
        workers = tuple(
            Worker(
                device=f"rank-{rank}",
                device_class="cpu",
                compute_dtype=self.dtype,
                **vars(share),
            )
            for rank, share in enumerate(self.shares)
        )
        return Plan(
            strategy="uneven",
            model=anatomy.fingerprint(),
            sequence_length=self.model.sequence,
            global_batch=self.global_batch,
            communication_dtype=self.dtype,
            stages=(Stage(units=tuple(u.name for u in anatomy.units), workers=workers),),
        )


def single_curves(case: Case, steps: int, micro_batches: Sequence[int]) -> list[list[float]]:
    """A single process's losses for each of several sizes of micro-batches, side by side."""
    devices = [Device(id=f"of {size}", device_class="cpu") for size in micro_batches]
    return launch(_single, devices, case, steps, tuple(micro_batches))


def engine_curve(case: Case, steps: int) -> tuple[list[float], list[RecordedStep]]:
    """The engine's losses, and its last step in detail, by rank."""
    devices = [Device(id=f"rank-{r}", device_class="cpu") for r in range(len(case.shares))]
    told = launch(_ranks, devices, case, steps)
    return told[0][0], [recording for _, recording in told]


def worst_difference(losses: Sequence[float], truth: Sequence[float]) -> float:
    """The largest relative one of any step."""
    return max(abs(a / b - 1) for a, b in zip(losses, truth, strict=True))


def warm_up(optimizers: Optimizers, step: int) -> None:
    """Let the learning rate rise to its value. The first steps of an optimizer that divides each
    gradient by its own size are full ones also where a gradient is but rounding."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        full = group.setdefault("full_lr", group["lr"])
        group["lr"] = full * min(1.0, (step + 1) / WARM_UP_STEPS)


def _single(
    seat: RankAddress, case: Case, steps: int, micro_batches: tuple[int, ...]
) -> list[float]:
    """A seat is a process by itself, in a group of one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = _model_alone(case)
    optimizers = case.theirs(model)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=LossScaler(active=True).scale,
        enabled=case.dtype == "fp16",
    )
    losses = []
    for step in range(steps):
        warm_up(optimizers, step)
        losses.append(_accumulated(model, case, step, micro_batches[seat.rank], scaler))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    dist.destroy_process_group()
    return losses


def _model_alone(case: Case) -> Any:
    model: Any = case.model.build()
    if case.dtype == "fp32":
        return model
    policy = MixedPrecisionPolicy(param_dtype=TORCH_DTYPE[case.dtype], reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (1,))
    for unit in split_into_units(model).units:
        fully_shard(unit.module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _accumulated(
    model: Any, case: Case, step: int, size: int, scaler: torch.amp.GradScaler
) -> float:
    """Forward and backward of a step; its mean loss."""
    total, begin = 0.0, 0
    for count in split_micro_batches(case.global_batch, size):
        part = {name: rows[begin : begin + count] for name, rows in case.batch(step).items()}
        begin += count
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(begin == case.global_batch)
        loss = model(**part).loss * (count / case.global_batch)
        scaler.scale(loss).backward()
        total += loss.item()
    return total


def _ranks(seat: RankAddress, case: Case, steps: int) -> tuple[list[float], RecordedStep]:
    torch.set_num_threads(1)
    with joined(seat):
        model = case.model.build()
        engine = gpumix.prepare(model, case.plan(model))
        optimizer = case.ours(engine)
        system = OnEngine(engine, optimizer)
        begin = sum(share.samples for share in case.shares[: seat.rank])
        own = slice(begin, begin + case.shares[seat.rank].samples)
        parts = ({n: rows[own] for n, rows in case.batch(s).items()} for s in range(steps))
        losses = []
        for step, part in enumerate(parts):
            warm_up([optimizer], step)
            losses.append(system.step(part).item())
        last = {name: rows[own] for name, rows in case.batch(steps).items()}
        return losses, system.recorded_step(last)
