"""Times of steps, by CUDA events on a card that is warm; memory and kernels of a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from proof.bench import Bench

Step = Callable[[], object]
WARM_S = 0.3
WARM_UP_STEPS = 3
SIDE = 8192  # of the matrix products that warm a card up; an idle H100 is at a sixth of its clock


@dataclass(frozen=True)
class Timed:
    """Steps of one system.

    Attributes:
        step_s: median of the device's seconds.
        host_s: median of the host's seconds until `step` returned.
        peak_bytes, reserved_bytes: the most that was allocated, and taken from the device, since
            `fresh_memory`; None where it is not counted.
    """

    step_s: float
    host_s: float
    peak_bytes: int | None
    reserved_bytes: int | None


def synchronize(bench: Bench) -> None:
    if bench.on_cuda:
        torch.cuda.synchronize()


def fresh_memory(bench: Bench) -> None:
    """Free what is not used any more, and begin a new peak."""
    gc.collect()
    if bench.on_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def warm_card(bench: Bench) -> None:
    """Matrix products for 0.3 s, after which clocks are those of a card that works."""
    if bench.place != "gpu":
        return
    product = torch.randn(SIDE, SIDE, device=bench.device, dtype=torch.bfloat16)
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_S:
        for _ in range(10):
            product @ product
        torch.cuda.synchronize()


def timed_steps(bench: Bench, step: Step, *, steps: int, warm_up: int = WARM_UP_STEPS) -> Timed:
    """Times of `steps` steps after some for warming up. The device is waited for before the first
    and after the last step alone."""
    for _ in range(warm_up):
        step()
    warm_card(bench)
    synchronize(bench)
    host_s, marks = [], [_mark(bench)]
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - begun)
        marks.append(_mark(bench))
    synchronize(bench)
    spans = [_seconds(a, b) for a, b in pairwise(marks)]
    peak = reserved = None
    if bench.on_cuda:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Timed(median(spans), median(host_s), peak, reserved)


def _mark(bench: Bench) -> Any:
    if not bench.on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def kernels_of(bench: Bench, step: Step) -> list[str]:
    """Names of what one step launches on the GPU; in a rehearsal of the operations on the CPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    real = bench.place == "gpu"
    with profile(activities=[ProfilerActivity.CUDA if real else ProfilerActivity.CPU]) as profiled:
        step()
        synchronize(bench)
    results = getattr(profiled.profiler, "kineto_results", None)
    if results is None:
        return []
    wanted = DeviceType.CUDA if real else DeviceType.CPU
    return [event.name() for event in results.events() if event.device_type() == wanted]
