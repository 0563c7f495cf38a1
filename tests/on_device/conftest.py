"""Tests that only the CUDA device for tests can run: they know when its streams are late."""

from __future__ import annotations

import pytest

import cuda_device


@pytest.fixture(autouse=True)
def _streams_in_time():
    """A test sets its own lag, and the next one finds none."""
    if not cuda_device.is_here():
        pytest.skip("runs on the CUDA device for tests: `make test-device`")
    before = cuda_device.current_lag()
    yield
    cuda_device.set_lag(before)
