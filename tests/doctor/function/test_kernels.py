"""What a GPU computes of some steps, by a profile's averages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpumix.doctor.function.watching.kernels import KernelProfile, sum_compute_s


def test_seconds_of_kernels_that_compute():
    averages = [
        SimpleNamespace(key="ampere_sgemm_128x64", self_device_time_total=1500.0),
        SimpleNamespace(key="Memcpy HtoD", self_device_time_total=500.0),
        SimpleNamespace(key="ncclDevKernel_AllGather_RING_LL", self_device_time_total=9000.0),
    ]
    assert sum_compute_s(averages) == pytest.approx(2e-3)


def test_without_a_gpu_nothing_is_known():
    kernels = KernelProfile()
    kernels.begin()
    assert kernels.seconds() is None
