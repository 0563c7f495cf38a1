"""The systems of the proof, a plain loop, FSDP2 and the engine, on models that the device holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import gpumix
from compared.setting import Batch, Order, Rates, Setting
from compared.systems import Fsdp, Loop, OnEngine, optimizer_of
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.engine.unit.regional_compile import compile_units
from gpumix.schema.plan.plan import Plan, ZeroStage
from proof.bench import Bench
from proof.models import Llama

TINY_LLAMA_RATES = Rates(learning_rate=4e-4, betas=(0.9, 0.95), weight_decay=0.1)
# Rehearsals compile without making code, which takes a CPU's compiler long.
REHEARSED_BACKEND = "eager"


def plain(setting: Setting, model: nn.Module, bench: Bench, *, compiled: bool = False) -> Loop:
    """The model as it is, fp32 weights and autocast to the setting's dtype."""
    if compiled:
        _compile_blocks(model, bench)
    return Loop(model, setting, autocast=True)


def fsdp2(
    setting: Setting, model: nn.Module, bench: Bench, *, reshard: bool, compiled: bool = False
) -> Any:
    """FSDP2 in the default process group, blocks and root sharded."""
    if compiled:
        _compile_blocks(model, bench)
    return Fsdp(reshard=reshard).wrap(model, setting, bench.device)


def engine(
    setting: Setting,
    model: nn.Module,
    bench: Bench,
    *,
    zero_stage: ZeroStage = 0,
    order: Order = "sequential",
    mode: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
) -> OnEngine:
    """The engine by a plan of one rank.

    Args:
        mode: further fields of the worker's mode.
        worker: further fields of the worker.
    """
    plan = changed(setting.plan(model, zero_stage, order), mode or {}, worker or {})
    comm = make_communicator(bench.device, plan.collectives)
    with _compiling(bench):
        made = gpumix.prepare(model, plan, comm=comm)
    return OnEngine(made, optimizer_of(made.parameters(), setting.rates))


def changed(plan: Plan, mode: dict[str, Any], worker: dict[str, Any]) -> Plan:
    """A plan of one stage with other fields in the modes of its workers, and in the workers."""
    stage = plan.stages[0]
    workers = tuple(
        one.model_copy(update={"mode": one.mode.model_copy(update=mode), **worker})
        for one in stage.workers
    )
    stages = (stage.model_copy(update={"workers": workers}),)
    return Plan.model_validate(plan.model_copy(update={"stages": stages}).model_dump())


def batches(spec: Llama, setting: Setting, bench: Bench, steps: int) -> list[Batch]:
    """Those of the first steps, on the device."""
    found = (setting.batch(step, 0) for step in range(steps))
    return [{name: rows.to(bench.device) for name, rows in one.items()} for one in found]


@contextmanager
def without_search_for_packs() -> Iterator[None]:
    """In each forward transformers looks whether positions are those of packed samples, and waits
    for the device to know. With it no system's host is ever ahead of the device, and what a step
    costs the host would not show."""
    with mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None):
        yield


def join_alone(bench: Bench) -> None:
    """Make the default process group, which FSDP2 needs, of this process alone. It lasts as long
    as the process: to leave it is one more thing that could hang."""
    backend = "nccl" if bench.on_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _compile_blocks(model: nn.Module, bench: Bench) -> None:
    for unit in split_into_units(model).units:
        unit.module.compile(backend=REHEARSED_BACKEND if bench.rehearses else "inductor")


@contextmanager
def _compiling(bench: Bench) -> Iterator[None]:
    """How the engine compiles units here."""
    if not bench.rehearses:
        yield
        return
    rehearsed = functools.partial(compile_units, backend=REHEARSED_BACKEND)
    with mock.patch("gpumix.engine.prepare.compile_units", rehearsed):
        yield


def forget_compiled(bench: Bench) -> None:
    """Drop what was compiled: code for one system's blocks is none for another's. The CUDA device
    of the tests has nothing of CUDA graphs, which would be dropped too."""
    if bench.place != "test device":
        torch._dynamo.reset()
