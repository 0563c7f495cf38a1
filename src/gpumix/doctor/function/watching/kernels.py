"""GPU compute time of some steps; a small fraction of a step means the GPU waits for work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gpumix.doctor.function.watching.steps import wait_for_gpu
from gpumix.hardware import runtime

_NCCL_PREFIX = "nccl"  # prefix of NCCL kernels, which keep running while waiting for other ranks


class KernelProfile:
    """A kernel profile from `begin` to `seconds`; inactive without a GPU or a kernel profiler."""

    def __init__(self) -> None:
        self._profile: Any = None

    def begin(self) -> None:
        if not runtime.is_initialized():
            return
        activity = runtime.profiler_activity()
        if activity in torch.profiler.supported_activities():  # a build may lack CUPTI
            self._profile = torch.profiler.profile(activities=[activity])
            self._profile.start()

    def seconds(self) -> float | None:
        """Return the seconds of computation; None: unknown."""
        if self._profile is None:
            return None
        wait_for_gpu()
        self._profile.stop()
        return sum_compute_s(self._profile.key_averages())


def sum_compute_s(kernels: Iterable[Any]) -> float:
    """Sum the seconds of a profile's kernels, without kernels moving data between GPUs."""
    return (
        sum(
            one.self_device_time_total
            for one in kernels
            if not one.key.lower().startswith(_NCCL_PREFIX)
        )
        / 1e6
    )
