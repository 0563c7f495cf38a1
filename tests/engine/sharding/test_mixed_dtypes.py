"""Ranks that compute in different dtypes, with weights that all gather in one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpumix.schema.plan.stage import Mode
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
    train_alone,
)

GPT2 = ARCHITECTURES["gpt2"]
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 4


def sgd(parameters):
    """Unlike Adam it makes no large updates of gradients that are almost nothing."""
    return torch.optim.SGD(parameters, lr=0.3)


def same_batch():
    return next(batches(GPT2, 6, 1))


def counted(batch):
    """Tokens that are predicted."""
    return int((batch["labels"][:, 1:] != -100).sum())


def rounded_alone(communication, parts):
    """One process: at each step the weights are rounded to `communication`; each of `parts` (rows,
    dtype) of the batch is computed in its own dtype with them, and the gradients are summed."""
    master = initialised(GPT2.factory)
    models = {dtype: initialised(GPT2.factory).to(TORCH[dtype]) for _, dtype in parts}
    optimizer, losses, batch = sgd(master.parameters()), [], same_batch()
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, begin = 0.0, 0
        for n, dtype in parts:
            model = models[dtype]
            model.zero_grad()
            for weight, copy in zip(master.parameters(), model.parameters()):
                copy.data.copy_(weight.data.to(TORCH[communication]))
            part = {k: v[begin : begin + n] for k, v in batch.items()}
            loss = mean_loss(model, part).float() * (counted(part) / counted(batch))
            loss.backward()
            for weight, copy in zip(master.parameters(), model.parameters()):
                held = 0 if weight.grad is None else weight.grad
                weight.grad = held + copy.grad.float()
            total, begin = total + loss.item(), begin + n
        optimizer.step()
        losses.append(total)
    return losses, {n: p.detach().numpy() for n, p in master.named_parameters()}


def _trained(shares, settings):
    engine = engine_for(GPT2.factory, shares, sequence_length=12, **settings)
    optimizer = sgd(engine.parameters())
    mine = own_rows(same_batch(), shares, engine.comm.rank)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(engine.step(mine).item())
        assert not engine.overflowed
        optimizer.step()
    weights = {n: v.numpy() for n, v in engine.state_dict(rank0_only=True).items()}
    computed = {str(dtype).removeprefix("torch.") for dtype in computed_in(engine)}
    return losses, weights, computed, engine.scaler.active


def worst(weights, expected):
    return max(
        np.linalg.norm(weights[n] - value) / max(np.linalg.norm(value), 1e-3 * value.size**0.5)
        for n, value in expected.items()
    )


FORMS = [(stage, "broadcast", 3) for stage in (0, 1, 3)]
FORMS += [(3, "padded", 3), (3, "padded", 2)]


@pytest.mark.parametrize("stage, forms, ranks", left_out(FORMS, FORMS[:4]))
def test_fp32_ranks_compute_with_rounded_weights(stage, forms, ranks):
    """All in fp32 but for a rank that only stores: exactly one process that rounds its weights."""
    shares = [Share(3, 2, 1), Share(0, 0, 2), Share(3, 1, 0)]
    if ranks == 2:
        shares = [Share(6, 2, 1), Share(0, 0, 2)]
    settings = {
        "compute_dtype": ("fp32", "bf16", "fp32")[:ranks],
        "zero_stage": stage,
        "collectives": {"gather": forms, "reduce": "all_to_all", "padding": ranks - 0.5},
    }
    told = run_ranks(_trained, ranks, shares, settings)
    losses, weights = rounded_alone("bf16", [(6, "fp32")])
    unrounded, _ = rounded_alone("fp32", [(6, "fp32")])
    for found, *_ in told:
        np.testing.assert_allclose(found, losses, rtol=2e-6)
        assert np.abs(np.subtract(found, unrounded)).max() > 1e-5  # rounding is seen
    assert worst(told[0][1], weights) < 2e-5
    expected = [{"float32"}, {"bfloat16"}, {"float32"}]
    assert [computed for *_, computed, _ in told] == expected[:ranks]


@pytest.mark.extended
@pytest.mark.parametrize(
    "dtypes, stage, mode",
    [
        (("fp32", "bf16"), 3, Mode()),
        (("bf16", "fp16"), 3, Mode()),
        (("fp32", "fp16"), 1, Mode(recompute=False, order="sequential")),
    ],
)
def test_parts_of_a_batch_in_different_dtypes(dtypes, stage, mode):
    shares = [Share(4, 2, 1, mode), Share(2, 1, 2, mode)]
    told = run_ranks(_trained, 2, shares, {"compute_dtype": dtypes, "zero_stage": stage})
    communication = "bf16" if "bf16" in dtypes else "fp16"
    losses, _ = rounded_alone(communication, [(4, dtypes[0]), (2, dtypes[1])])
    exact = train_alone(GPT2, 6, 1).losses[0]
    for found, _, _, scaled in told:
        np.testing.assert_allclose(found, losses, rtol=3e-3)
        assert found[0] == pytest.approx(exact, rel=3e-3)
        assert scaled == ("fp16" in dtypes)
    assert told[0][0] == told[1][0]


def test_narrow_ranks_may_gather_in_fp32():
    settings = {"compute_dtype": "bf16", "communication_dtype": "fp32"}
    losses, *_ = _trained([Share(6, 3, 1)], settings)
    expected, _ = rounded_alone("fp32", [(6, "bf16")])
    np.testing.assert_allclose(losses, expected, rtol=3e-3)


def _overflow(shares):
    engine = engine_for(GPT2.factory, shares, compute_dtype=("fp32", "fp16"), sequence_length=12)
    engine.scaler.scale = 2.0**40
    engine.step(own_rows(same_batch(), shares, engine.comm.rank))
    return engine.overflowed, engine.scaler.scale, all(p.grad is None for p in engine.parameters())


@pytest.mark.extended
def test_all_drop_a_step_that_overflowed_in_fp16():
    """The rank in fp32 stores all, and computes nothing that overflows."""
    assert run_ranks(_overflow, 2, [Share(3, 3, 1), Share(3, 3, 0)]) == [(True, 2.0**39, True)] * 2


def _frozen(shares):
    engine = engine_for(frozen, shares, compute_dtype=("fp32", "bf16"), sequence_length=12)
    engine.step(own_rows(same_batch(), shares, engine.comm.rank))
    held = {n: v for n, v in engine.state_dict().items() if not frozen_names.get(n, True)}
    return {n: (str(v.dtype), v.float().numpy()) for n, v in held.items()}


def frozen():
    model = GPT2.factory()
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    return model


frozen_names = {n: p.requires_grad for n, p in frozen().named_parameters()}


@pytest.mark.extended
def test_frozen_parameters_have_one_value_for_all():
    one, other = run_ranks(_frozen, 2, [Share(3, 2, 1), Share(3, 3, 2)])
    values = {
        n: p
        for n, p in initialised(GPT2.factory).named_parameters()
        if not frozen_names.get(n, True)
    }
    assert one.keys() == other.keys() == values.keys()
    for name, value in values.items():
        expected = value.detach().to(torch.bfloat16).float().numpy()
        for found in (one, other):
            assert found[name][0] == "torch.bfloat16"
            np.testing.assert_array_equal(found[name][1], expected)


@pytest.mark.parametrize("dtype", TORCH)
def test_ranks_alike_need_no_memory_to_arrive_in(dtype):
    engine = engine_alone(GPT2.factory, 2, 1, compute_dtype=dtype)
    assert all(group.arriving is None for group in engine.groups())
