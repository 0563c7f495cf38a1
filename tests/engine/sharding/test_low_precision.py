"""bf16 and fp16: gathered and computed in them, stored, accumulated and reduced in fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, mean_loss
from helpers.training.reference import (
    Share,
    batches,
    computed_in,
    engine_alone,
    engine_for,
    initialised,
    own_rows,
)

GPT2 = ARCHITECTURES["gpt2"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 6


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def same_batch():
    return next(batches(GPT2, 6, 1))


def alone_in_low_precision(dtype):
    """A single process: fp32 weights, a copy of them in `dtype` that computes."""
    master, model = initialised(GPT2.factory), initialised(GPT2.factory).to(dtype)
    optimizer = adamw(master.parameters())
    losses = []
    for _ in range(STEPS):
        for weight, copy in zip(master.parameters(), model.parameters()):
            copy.data.copy_(weight.data)
        model.zero_grad()
        loss = mean_loss(model, same_batch())
        loss.backward()
        for weight, copy in zip(master.parameters(), model.parameters()):
            weight.grad = copy.grad.float()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _losses(shares, dtype):
    engine = engine_for(GPT2.factory, shares, compute_dtype=dtype, sequence_length=12)
    optimizer = adamw(engine.parameters())
    mine = own_rows(same_batch(), shares, engine.comm.rank)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(engine.step(mine).item())
        assert not engine.overflowed
        optimizer.step()
    return losses


@pytest.mark.parametrize("dtype", left_out(DTYPES, ["bf16"]))
def test_the_loss_falls_as_in_one_process_of_that_precision(dtype):
    expected = alone_in_low_precision(DTYPES[dtype])
    assert expected[-1] < expected[0] - 0.2
    shares = [Share(3, 2, 1), Share(0, 0, 2), Share(3, 1, 0)]
    for losses in run_ranks(_losses, 3, shares, dtype):
        np.testing.assert_allclose(losses, expected, rtol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_are_in_it_and_state_is_not(dtype):
    engine = engine_alone(GPT2.factory, 2, 1, compute_dtype=dtype, sequence_length=12)
    engine.step({k: v[:2] for k, v in same_batch().items()})
    assert computed_in(engine) == {DTYPES[dtype]}
    assert {p.dtype for p in engine.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in engine.parameters()} == {torch.float32}


def test_gradients_do_not_depend_on_the_loss_scale():
    gradients = []
    for scale in (2.0**8, 2.0**13):
        engine = engine_alone(GPT2.factory, 6, 2, compute_dtype="fp16", sequence_length=12)
        engine.scaler.scale = scale
        engine.step(same_batch())
        gradients.append(np.concatenate([p.grad.numpy().reshape(-1) for p in engine.parameters()]))
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=0.05, atol=1e-4)


def overflowing():
    engine = engine_alone(GPT2.factory, 6, 2, compute_dtype="fp16", sequence_length=12)
    engine.scaler.scale = 2.0**40
    return engine


def test_a_step_that_overflows_leaves_no_gradients_and_halves_the_scale():
    engine = overflowing()
    loss = engine.step(same_batch())
    assert loss.isfinite()
    assert engine.overflowed
    assert engine.scaler.scale == 2.0**39
    assert all(p.grad is None for p in engine.parameters())


def test_optimizers_pass_over_a_step_that_overflowed():
    engine = overflowing()
    optimizer = adamw(engine.parameters())
    before = [p.detach().clone() for p in engine.parameters()]
    engine.step(same_batch())
    assert engine.clip_grad_norm_(1.0) == 0
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(engine.parameters(), before))
    assert not optimizer.state


@pytest.mark.extended
def test_training_goes_on_after_overflows():
    engine = overflowing()
    for _ in range(40):
        engine.step(same_batch())
        if not engine.overflowed:
            break
    assert all(p.grad.isfinite().all() for p in engine.parameters())
    assert engine.scaler.scale < 2.0**24


def _overflow_on_one_rank(shares):
    engine = engine_for(GPT2.factory, shares, compute_dtype="fp16", sequence_length=12)
    mine = own_rows(same_batch(), shares, engine.comm.rank)
    if engine.comm.rank == 1:
        # the first rank's part of the state stays finite: only the others see the overflow
        next(iter(engine.groups())).shards[0].master[-1] = float("inf")
    engine.step(mine)
    return engine.overflowed, engine.scaler.scale, all(p.grad is None for p in engine.parameters())


def test_all_ranks_drop_a_step_that_overflowed_on_one():
    told = run_ranks(_overflow_on_one_rank, 2, [Share(3, 3, 1), Share(3, 3, 1)])
    assert told == [(True, 2.0**15, True)] * 2


def test_the_scale_grows_again():
    engine = engine_alone(GPT2.factory, 2, 2, compute_dtype="fp16", sequence_length=12)
    engine.scaler.load_state_dict({"scale": 16.0, "good_steps": 1999})
    engine.step({k: v[:2] for k, v in same_batch().items()})
    assert engine.scaler.state_dict() == {"scale": 32.0, "good_steps": 0}


def test_bf16_has_no_use_for_a_scale():
    engine = engine_alone(GPT2.factory, 2, 2, compute_dtype="bf16")
    assert not engine.scaler.active
    assert engine.scaler.scale == 1.0
