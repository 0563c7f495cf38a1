"""Warm-up of a GPU to its temperature and clock in training.

An idle card is cold and faster than it can sustain, so times measured then are too short.
"""

from __future__ import annotations

import time

import torch

from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.runtime import is_gpu
from gpumix.profiler.compute.peak_flops import make_matrices
from gpumix.schema.cluster.clocks import GpuClocks

WARM_UP_S = 0.3
CLOCK_PRODUCTS = 2  # products during which clocks are read


def warm_up(runtime: DeviceRuntime, dtype: torch.dtype) -> GpuClocks | None:
    """Run large products on a GPU for `WARM_UP_S`, and return its clocks at the end, under load.
    Nothing is done on a CPU."""
    if not is_gpu(runtime.torch_device):
        return None
    one, other, into = make_matrices(runtime, dtype)
    runtime.synchronize()
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_UP_S:
        torch.mm(one, other, out=into)
        runtime.synchronize()
    for _ in range(CLOCK_PRODUCTS):
        torch.mm(one, other, out=into)
    found = runtime.clocks()  # while products run
    runtime.synchronize()
    return found
