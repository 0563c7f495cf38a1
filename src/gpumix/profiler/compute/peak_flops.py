"""Peak of a device, measured by large matrix products where no data sheet gives one."""

from __future__ import annotations

from functools import partial

import torch

from gpumix.hardware.device import DeviceRuntime
from gpumix.schema.peak_flops import Peak

MAX_MATRIX_ROWS = {"cuda": 8192, "cpu": 1024}  # rows and columns; larger products are not faster
MEMORY_DIVISOR = 16  # the three matrices fill at most this fraction of memory
REPEATS = 5


def measure_peak(runtime: DeviceRuntime, dtype: torch.dtype) -> Peak:
    """Return the fastest of some products of square matrices."""
    one, other, into = make_matrices(runtime, dtype)
    product = partial(torch.mm, one, other, out=into)
    fastest = min(runtime.seconds(product) for _ in range(1 + REPEATS))
    return Peak(flops_per_s=2 * len(one) ** 3 / fastest, source="measured")


def make_matrices(
    runtime: DeviceRuntime, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two square matrices, of the size of the fastest product, and the output."""
    device = runtime.torch_device
    size = MAX_MATRIX_ROWS.get(device.type, MAX_MATRIX_ROWS["cuda"])
    while size > 64 and 3 * size**2 * dtype.itemsize > runtime.memory_limit_bytes // MEMORY_DIVISOR:
        size //= 2
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return one, other, torch.empty_like(one)
