"""The engine on GPUs ends where one process on the CPU does. `pytest -m gpu tests/engine`."""

from __future__ import annotations

import pytest
import torch

from gpumix.spec.plan import Collectives
from models import ARCHITECTURES
from reference import Share, train_alone, train_by_plan, worst_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 5
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "plain-own-blocks"])
def test_one_gpu_trains_like_one_process(name):
    found = train_by_plan(name, [Share(5, 2, 1)], STEPS, backend="nccl")
    assert worst_error(found, train_alone(ARCHITECTURES[name], 5, STEPS)) < 1e-4


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_stays_close(dtype):
    found = train_by_plan("llama", [Share(4, 2, 1)], STEPS, backend="nccl", compute_dtype=dtype)
    alone = train_alone(ARCHITECTURES["llama"], 4, STEPS)
    assert found.losses == pytest.approx(alone.losses, rel=0.03)


@pytest.mark.parametrize("name, dtype", [("gemma2", "fp32"), ("t5", "fp32"), ("gpt2", "bf16")])
def test_a_head_in_chunks(name, dtype):
    settings = {"head": "chunked", "compute_dtype": dtype}
    found = train_by_plan(name, [Share(5, 2, 1)], STEPS, backend="nccl", **settings)
    alone = train_alone(ARCHITECTURES[name], 5, STEPS)
    assert found.losses == pytest.approx(alone.losses, rel=0.03 if dtype == "bf16" else 1e-4)


@TWO
@pytest.mark.parametrize(
    "shares", [[(3, 2, 1), (3, 3, 1)], [(4, 3, 3), (2, 1, 1)], [(6, 2, 0), (0, 0, 1)]]
)
@pytest.mark.parametrize(
    "forms",
    [
        Collectives(gather="list", reduce="list"),
        Collectives(gather="padded", reduce="padded", padding=2.0),
        Collectives(),
    ],
    ids=["list", "padded", "default"],
)
def test_every_collective_trains_like_one_process(shares, forms):
    given = [Share(*share) for share in shares]
    found = train_by_plan("gpt2", given, STEPS, backend="nccl", collectives=forms)
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 6, STEPS)) < 1e-4
