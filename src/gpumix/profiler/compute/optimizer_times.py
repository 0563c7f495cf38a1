"""Optimizer measurements: updates on a device or its host, and copies between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median_high
from typing import Any

import torch

from gpumix.cost.memory_layout.curves import remove_timing_noise
from gpumix.engine.offload.copy_lanes import CopyLane
from gpumix.engine.offload.host_offload import allocate_on_host
from gpumix.engine.offload.state_transfers import StateTransfers
from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
from gpumix.engine.optimizers.base import FullParameterOptimizer
from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.profiler.compute.unit_runner import tensor_bytes
from gpumix.schema.curve import Curve
from gpumix.schema.plan.optimizer_state import OptimizerState

OPTIMIZER_NUMEL = 2**26  # enough to hide a GPU's launch time
HOST_NUMEL = 2**22  # larger than caches
COPIED_BYTES = (2**16, 2**20, 2**24, 2**26)
SUMMED_ROWS = 2
REPEATS = 3


@dataclass(frozen=True)
class OptimizerCost:
    """Optimizer cost per element: seconds of a step, and bytes of state, first of the units'
    matrices, then of everything else; the state's form; and whether an update exchanges matrices
    that several ranks store."""

    s_per_element: float
    state_bytes: tuple[int, int]
    state_form: OptimizerState = "fp32"
    exchanges_matrices: bool = False


def time_optimizer(
    runtime: DeviceRuntime,
    optimizer_of: Callable[[list[torch.nn.Parameter]], Any],
    unit_shapes: Sequence[torch.Size],
) -> OptimizerCost:
    """Time the optimizer on one shard, a small part of the device's memory. An optimizer of whole
    matrices runs on parameters of a unit's shapes, as many as fit."""
    device = runtime.torch_device
    numel = min(OPTIMIZER_NUMEL, runtime.memory_limit_bytes // 64)
    parameters = _trial_parameters(device, [torch.Size([numel])])
    optimizer = optimizer_of(parameters)
    whole = isinstance(optimizer, FullParameterOptimizer)
    if whole:
        totals = accumulate(shape.numel() for shape in unit_shapes)
        fitting = [shape for shape, total in zip(unit_shapes, totals) if total <= numel]
        parameters = _trial_parameters(device, fitting or unit_shapes[:1])
        numel = sum(p.numel() for p in parameters)
        optimizer = optimizer_of(parameters)
    seconds = _time_without_first(runtime, optimizer.step)
    # State independent of parameter size (a step counter) is zero per element.
    state = 0 if whole else tensor_bytes(optimizer.state[parameters[0]]) // numel
    per_element = optimizer.state_bytes if whole else (state, state)
    form: OptimizerState = "8bit" if isinstance(optimizer, AdamW8bit) else "fp32"
    exchanges = whole and optimizer.exchanges_matrices
    return OptimizerCost(seconds / numel, per_element, form, exchanges)


def time_host_optimizer(
    runtime: DeviceRuntime, optimizer_of: Callable[[list[torch.nn.Parameter]], Any]
) -> float | None:
    """Return the seconds per element with offload; None for an optimizer of whole matrices, which
    updates on the device."""
    with count_as_host_memory():
        parameters = _trial_parameters(torch.device("cpu"), [torch.Size([HOST_NUMEL])])
        optimizer = optimizer_of(parameters)
        if isinstance(optimizer, FullParameterOptimizer):
            return None
        return _time_without_first(runtime, optimizer.step) / HOST_NUMEL


def time_host_copies(runtime: DeviceRuntime) -> Curve:
    """Return the seconds to copy bytes to the host, or back: the slower direction."""
    device, seconds = runtime.torch_device, []
    lanes = StateTransfers(device)
    sizes = [n for n in COPIED_BYTES if n <= max(COPIED_BYTES[0], runtime.memory_limit_bytes // 64)]
    for size in sizes:
        here = torch.zeros(size, dtype=torch.uint8, device=device)
        there = allocate_on_host(size, torch.uint8, device)
        out = _time_without_first(runtime, partial(_copy, lanes.to_host, there, here))
        back = _time_without_first(runtime, partial(_copy, lanes.to_device, here, there))
        seconds.append(max(out, back))
    return Curve(sizes=tuple(map(float, sizes)), values=remove_timing_noise(seconds))


def time_host_sums(runtime: DeviceRuntime) -> float:
    """Return the seconds per byte to sum gradients of several ranks on the host."""
    with count_as_host_memory():
        rows = torch.zeros(SUMMED_ROWS, HOST_NUMEL)
        into = torch.empty(HOST_NUMEL)
        work = partial(torch.sum, rows, 0, out=into)
        return _time_without_first(runtime, work) / rows.nbytes


def _copy(lane: CopyLane, into: torch.Tensor, source: torch.Tensor) -> None:
    lane.carry(source.nbytes)
    with lane.active():
        into.copy_(source, non_blocking=True)
    lane.mark().wait()


def _time_without_first(runtime: DeviceRuntime, work: Callable[[], Any]) -> float:
    """Return the seconds of `work`, without the first run."""
    return median_high([runtime.seconds(work) for _ in range(1 + REPEATS)][1:])


def _trial_parameters(
    device: torch.device, shapes: Sequence[torch.Size]
) -> list[torch.nn.Parameter]:
    """Make parameters with gradients, all zero."""
    made = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.zeros(shape, device=device))
        parameter.grad = torch.zeros_like(parameter)
        made.append(parameter)
    return made
