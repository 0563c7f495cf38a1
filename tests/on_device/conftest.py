"""Tests that only the CUDA device for tests can run: they know when its streams are late."""

from __future__ import annotations

import pytest
import torch

import cuda_device


@pytest.fixture(autouse=True)
def _streams_in_time():
    """A test sets its own lag, and the next one finds none."""
    if not cuda_device.is_here():
        pytest.skip("runs on the CUDA device for tests: `make test-device`")
    before = cuda_device.current_lag()
    yield
    if torch.cuda.is_initialized():  # what a test left undone must not reach into the next one
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    cuda_device.set_lag(before)
