"""The systems that are compared on equal devices: a plain loop, DDP, FSDP2 and the engine.

All train the same model from the same weights with fused AdamW, without clipping. DDP and FSDP2 are
used as their documentation says for speed: gradient buckets as views, gradients exchanged once a
step where their whole is kept, gathers ahead of use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gpumix
from compared.setting import USUAL_RATES, Batch, Order, Rates, Setting
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.comm.step_recorder import SILENT, RecordedStep, Recorder
from gpumix.engine.engine import Engine
from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.schema.profile.profile import ROOT

Exchanging = Callable[[bool], AbstractContextManager[None]]
"""Called before each micro-batch with whether it is the step's last one; entered around it."""


class System(Protocol):
    """`step` does all of one step and gives this rank's mean loss."""

    def step(self, batch: Batch) -> torch.Tensor: ...


@dataclass(frozen=True)
class Plain:
    """The model as it is, one process."""

    name: str = "plain loop"

    def make(self, setting: Setting, device: torch.device) -> System:
        model = setting.model.build().to(device)
        if setting.recompute:
            recomputing(model)
        return Loop(model, setting, autocast=True)


@dataclass(frozen=True)
class Ddp:
    """Everything replicated, as ZeRO stage 0."""

    name: str = "DDP"

    def make(self, setting: Setting, device: torch.device) -> System:
        model = setting.model.build().to(device)
        if setting.recompute:
            recomputing(model)
        replicas, exchanging = self.distribute(model, device)
        return Loop(replicas, setting, exchanging, autocast=True)

    def distribute(
        self, model: nn.Module, device: torch.device, dtype: ComputeDtype = "fp32"
    ) -> tuple[nn.Module, Exchanging]:
        """Replicate a model; gradients are averaged in the step's last micro-batch alone. It
        computes in the model's own dtype, whatever `dtype` is."""
        ids = [device] if device.type == "cuda" else None
        replicas = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

        def exchanging(last: bool) -> AbstractContextManager[None]:
            return nullcontext() if last else replicas.no_sync()

        return replicas, exchanging


@dataclass(frozen=True)
class Fsdp:
    """FSDP2: every block a unit, and the rest.

    Attributes:
        reshard: parameters are sharded again after each pass (ZeRO stage 3), else after the step's
            last one.
        whole_gradients: micro-batches add up whole gradients, which are exchanged once a step;
            else each micro-batch's are exchanged, and only shards are kept.
        ahead: units are gathered ahead of use, and the root's stay gathered between forward and
            backward, as torch does by itself; faster, and takes more memory.
    """

    reshard: bool
    whole_gradients: bool = False
    ahead: bool = True

    @property
    def name(self) -> str:
        kept = [] if self.reshard else ["parameters"]
        kept += ["gradients"] if self.whole_gradients else []
        late = "" if self.ahead else ", gathers at use"
        return f"FSDP2{', whole ' if kept else ''}{' and '.join(kept)}{late}"

    def make(self, setting: Setting, device: torch.device) -> System:
        return self.wrap(setting.model.build().to(device), setting, device)

    def wrap(self, model: Any, setting: Setting, device: torch.device) -> System:
        """Shard a model that is there."""
        if setting.recompute:
            recomputing(model)
        sharded, exchanging = self.distribute(model, device, setting.dtype)
        return Loop(sharded, setting, exchanging)

    def distribute(
        self, model: Any, device: torch.device, dtype: ComputeDtype = "fp32"
    ) -> tuple[nn.Module, Exchanging]:
        """Shard a model over all ranks, to compute in `dtype`; gradients are averaged."""
        self._shard(model, [unit.module for unit in split_into_units(model).units], device, dtype)

        def exchanging(last: bool) -> AbstractContextManager[None]:
            if self.whole_gradients:
                model.set_requires_gradient_sync(last)
            if not self.reshard:
                model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
            return nullcontext()

        return model, exchanging

    def _shard(
        self, model: Any, blocks: Sequence[nn.Module], device: torch.device, dtype: ComputeDtype
    ) -> None:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=TORCH_DTYPE[dtype], reduce_dtype=torch.float32)
        # None: all but the root, which backward wants at once; it is the default for that reason.
        sharded = None if self.ahead else True
        reshard = sharded if self.reshard else False
        options = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy}
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if self.ahead and device.type == "cpu":  # without streams it must be told to gather ahead
            model._set_unshard_async_op(True)
            for module, following in pairwise([model, *blocks]):
                assert isinstance(module, FSDPModule) and isinstance(following, FSDPModule)
                module.set_modules_to_forward_prefetch([following])


@dataclass(frozen=True)
class Gpumix:
    """The engine at a ZeRO stage."""

    zero_stage: ZeroStage
    order: Order = "layered"

    @property
    def name(self) -> str:
        return f"gpumix, ZeRO {self.zero_stage}, {self.order}"

    def make(self, setting: Setting, device: torch.device) -> System:
        model = setting.model.build()
        plan = setting.plan(model, self.zero_stage, self.order, nccl=device.type == "cuda")
        engine = gpumix.prepare(model, plan, comm=make_communicator(device, plan.collectives))
        return OnEngine(engine, optimizer_of(engine.parameters(), setting.rates))


Entrant = Plain | Ddp | Fsdp | Gpumix


class Loop:
    """An ordinary training loop around a model that may be wrapped.

    Args:
        exchanging: what goes around each micro-batch.
        autocast: compute in the setting's precision by `torch.autocast`; the model does not itself.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        exchanging: Exchanging = lambda last: nullcontext(),
        *,
        autocast: bool = False,
    ) -> None:
        self._model = model
        self._autocast_to = TORCH_DTYPE[setting.dtype] if autocast else torch.float32
        self._micro_batches = setting.micro_batches
        self._exchanging = exchanging
        self._optimizer = optimizer_of(model.parameters(), setting.rates)

    def step(self, batch: Batch) -> torch.Tensor:
        device = next(self._model.parameters()).device
        cut = {name: rows.to(device).chunk(self._micro_batches) for name, rows in batch.items()}
        total = torch.zeros((), device=device)
        for number in range(self._micro_batches):
            part = {name: rows[number] for name, rows in cut.items()}
            with self._exchanging(number == self._micro_batches - 1):
                with self._precision(device):
                    loss = self._model(**part).loss / self._micro_batches
                loss.backward()
            total += loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def _precision(self, device: torch.device) -> AbstractContextManager[None]:
        if self._autocast_to == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self._autocast_to)


class OnEngine:
    """The engine by a plan."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.engine = engine
        self._optimizer = optimizer

    def step(self, batch: Batch) -> torch.Tensor:
        loss = self.engine.step(batch)
        self.engine.comm.record.computes("optimizer", ROOT)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def recorded_step(self, batch: Batch) -> RecordedStep:
        """A step that tells what its time went into."""
        comm = self.engine.comm
        comm.record = recorder = Recorder(comm, self.engine.plan.workers[comm.rank])
        recorder.begin()
        self.step(batch)
        recorder.end()
        comm.record = SILENT
        return recorder.recording()


def optimizer_of(
    parameters: Iterator[nn.Parameter], rates: Rates = USUAL_RATES
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=rates.learning_rate,
        betas=rates.betas,
        weight_decay=rates.weight_decay,
        fused=True,
    )


def recomputing(model: nn.Module) -> None:
    """Make each block keep only its input, and compute again what its backward needs."""
    for unit in split_into_units(model).units:
        unit.module.forward = partial(checkpoint, unit.module.forward, use_reentrant=False)
