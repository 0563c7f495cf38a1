"""The fused kernel of the loss gives PyTorch's losses and gradients; without Triton it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from gpumix.engine.cross_entropy.fused_cross_entropy import compute_fused_losses
from gpumix.schema.errors import MachineError
from helpers.errors import raises
from helpers.paths import TESTS

BOUNDS = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1e-2}


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, TESTS / "helpers" / "training" / "fused_losses.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_triton
def test_the_kernel_computes_the_losses_and_gradients_of_pytorch(found):
    assert len(found["errors"]) == 6
    for name, error in found["errors"].items():
        assert error < BOUNDS[name.split()[1]], name


@needs_triton
def test_no_lane_loads_a_logit_that_another_lane_overwrites(found):
    assert found["shared"] == 0


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_there_is_a_word():
    with raises(MachineError, code="triton-missing", fix="pip install triton"):
        compute_fused_losses(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), None, 0.0)
