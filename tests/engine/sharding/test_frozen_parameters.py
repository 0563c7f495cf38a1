"""Frozen parameters are gathered, never trained, and kept in the compute dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gpumix
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.training.models import ARCHITECTURES, mean_loss
from helpers.training.reference import (
    Share,
    assert_ranks_step_plainly,
    assert_step_is_plain,
    batches,
    engine_alone,
)

GPT2 = ARCHITECTURES["gpt2"]


class LowRank(nn.Module):
    """A frozen layer beside a small trained one."""

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(size, 2, bias=False)
        self.up = nn.Linear(2, size, bias=False)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def adapted():
    """GPT-2 with all frozen but low-rank layers in the blocks 1 and 2."""
    model = GPT2.factory().requires_grad_(False)
    for block in model.transformer.h[1:]:
        block.ln_1 = LowRank(block.ln_1, 32)
    return model


def frozen_block():
    model = GPT2.factory()
    model.transformer.h[1].requires_grad_(False)
    return model


def frozen_bottom():
    model = GPT2.factory()
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    return model


def frozen_top():
    model = GPT2.factory()
    model.transformer.ln_f.requires_grad_(False)
    model.transformer.h[2].requires_grad_(False)
    return model


FACTORIES = [adapted, frozen_block, frozen_bottom, frozen_top]


@pytest.mark.parametrize("factory", FACTORIES)
def test_gradients_are_those_of_plain_training(factory):
    engine = engine_alone(factory, 5, 2)
    assert_step_is_plain(engine, factory, next(batches(GPT2, 5, 1)))


def test_only_trained_parameters_are_for_the_optimizer():
    engine = engine_alone(adapted, 2, 1)
    names = {name for name, _ in engine.named_parameters()}
    assert names == {f"transformer.h.{i}.ln_1.{p}.weight" for i in (1, 2) for p in ("up", "down")}
    assert all(p.requires_grad for p in engine.parameters())


def test_frozen_parameters_are_stored_in_the_compute_dtype():
    engine = engine_alone(frozen_block, 2, 1, compute_dtype="bf16")
    dtypes = {p.local.requires_grad: p.local.dtype for p in engine.pieces()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_adapters_train_on_several_ranks():
    shares = [Share(3, 2, 1), Share(0, 0, 3), Share(2, 1, 0)]
    assert_ranks_step_plainly(adapted, shares, next(batches(GPT2, 5, 1)))


def test_a_model_without_trained_parameters_is_evaluated_but_not_trained():
    model = GPT2.factory().requires_grad_(False).eval()
    batch = next(batches(GPT2, 2, 1))
    with torch.no_grad():
        expected = mean_loss(model, batch)
    engine = engine_alone(lambda: model, 2, 1)
    assert engine.evaluate(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    with raises(InputError, code="nothing-to-train"):
        engine.step(batch)


def test_a_model_without_trained_parameters_is_not_profiled():
    def frozen():
        return GPT2.factory().requires_grad_(False)

    with raises(InputError, code="nothing-to-train"):
        gpumix.profile(
            frozen,
            lambda samples: next(batches(GPT2, samples, 1)),
            sequence_length=16,
            global_batch_size=4,
            progress=lambda line: None,
        )
