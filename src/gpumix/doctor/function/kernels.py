"""Adds up what a GPU computes in some steps: where that is little of them, it waits for work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gpumix.doctor.function.steps import wait_for_gpu
from gpumix.hardware import runtime

_WAITS = "nccl"  # what its kernels' names begin with, which run while they wait for others


class Kernels:
    """From `begin` to `seconds`; without a GPU, or a profiler of its kernels, nothing."""

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
        """That it computed; None: not known."""
        if self._profile is None:
            return None
        wait_for_gpu()
        self._profile.stop()
        return computing_s(self._profile.key_averages())


def computing_s(kernels: Iterable[Any]) -> float:
    """Of a profile's averages by kernel; those that move data between GPUs do not compute."""
    return (
        sum(one.self_device_time_total for one in kernels if not one.key.lower().startswith(_WAITS))
        / 1e6
    )
