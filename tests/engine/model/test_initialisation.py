"""Initial values: the model's own initialiser, the same whatever the plan."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers.initialization import orthogonal_

from gpumix.engine.model.deferred_init import build, get_operation_log
from helpers.extended import every_second, left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, WIDTH, Block, Regression, vectors
from helpers.training.reference import SEED, Share, engine_alone, engine_for, joined, pieces_of

LARGE = 100  # WIDTH x LARGE x 4 elements are more than are made at once


def whole(factory, seed=SEED):
    """All parameters of a built model, by name."""
    model = build(factory, seed)
    log = get_operation_log(model)
    return {n: log.materialize(p) if p.is_meta else p for n, p in model.named_parameters()}


def _initial_values(name, shares):
    return pieces_of(engine_for(ARCHITECTURES[name].factory, shares))


@pytest.mark.parametrize("name", every_second(["gpt2", "bart"]))
def test_values_do_not_depend_on_the_plan(name):
    one = joined([_initial_values(name, [Share(1, 1, 1)])])
    shares = [Share(1, 1, 3), Share(0, 0, 0), Share(2, 1, 2)]
    three = joined(run_ranks(_initial_values, 3, name, shares))
    assert one.keys() == three.keys()
    for key, values in one.items():
        assert np.array_equal(values, three[key]), key


@pytest.mark.parametrize("name", left_out(ARCHITECTURES, ["bart", "bloom", "whisper"]))
def test_values_are_distributed_as_the_models_own(name):
    torch.manual_seed(0)
    own = dict(ARCHITECTURES[name].factory().named_parameters())
    for key, value in whole(ARCHITECTURES[name].factory).items():
        n, std, mean = own[key].numel(), own[key].std().item(), own[key].mean().item()
        if std == 0 or math.isnan(std):
            assert torch.equal(value, own[key]), key
            continue
        if n < 100:
            continue
        # five standard errors of the difference of two standard deviations, and of two means
        assert value.std().item() == pytest.approx(std, rel=5 / math.sqrt(n)), key
        assert value.mean().item() == pytest.approx(mean, abs=5 * std * math.sqrt(2 / n)), key


def test_parameters_differ_from_each_other_and_with_the_seed():
    first, other = whole(large_model, 1), whole(large_model, 2)
    assert not torch.equal(first["enter.weight"], other["enter.weight"])
    assert not torch.equal(first["blocks.0.wide.weight"], first["blocks.1.wide.weight"])


def test_a_module_that_is_imported_meanwhile_changes_nothing():
    """Importing may compute something, which happens once in a process."""
    imported = []

    def factory():
        if not imported:
            imported.append(torch.arange(3) * 2.0)
        return large_model()

    first, second = whole(factory), whole(factory)
    for name, values in first.items():
        assert torch.equal(values, second[name]), name


def test_building_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    whole(large_model)
    whole(reads_values)
    assert torch.equal(torch.rand(2), expected)


class Wide(nn.Module):
    """A block with parameters that are too large to be made at once."""

    def __init__(self, initialise=lambda tensor: None) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * LARGE)
        self.back = nn.Linear(4 * LARGE, WIDTH)
        initialise(self.wide.weight)

    def forward(self, x):
        return x + self.back(torch.relu(self.wide(x)))


def large_model(initialise=lambda tensor: None):
    return Regression([Wide(initialise) for _ in range(2)])


def is_deferred(model):
    return model.blocks[0].wide.weight.is_meta


def test_large_parameters_are_deferred_and_small_ones_are_not():
    model = build(large_model, SEED)
    assert is_deferred(model)
    assert not model.enter.weight.is_meta


def test_truncated_normal():
    def factory():
        return large_model(lambda w: nn.init.trunc_normal_(w, std=0.1, a=-0.15, b=0.15))

    values = whole(factory)["blocks.0.wide.weight"]
    assert is_deferred(build(factory, SEED))
    assert values.abs().max() <= 0.15
    assert values.std().item() == pytest.approx(0.0743, rel=0.05)


def by_qr(weight):
    weight.data.copy_(torch.linalg.qr(torch.randn(weight.shape))[0])


@pytest.mark.parametrize("initialise", [nn.init.orthogonal_, orthogonal_, by_qr])
def test_orthogonal(initialise):
    def factory():
        return large_model(initialise)

    values = whole(factory)["blocks.0.wide.weight"]
    assert is_deferred(build(factory, SEED))
    torch.testing.assert_close(values.T @ values, torch.eye(WIDTH), atol=1e-5, rtol=0)


def test_what_is_computed_from_a_schedule_of_numbers():
    def factory():
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
        model = large_model()
        for rate, block in zip(rates, model.blocks, strict=True):
            block.back.weight.data.mul_(rate)
        return model

    values = whole(factory)
    assert is_deferred(build(factory, SEED))
    assert not values["blocks.0.back.weight"].any()
    assert values["blocks.1.back.weight"].std() > 0


def test_writes_to_parts_and_copies():
    def factory():
        model = large_model()
        first, second = (block.wide.weight for block in model.blocks)
        with torch.no_grad():
            first[0].fill_(7.0)
            second.copy_(first)
            second[:, :2] *= 2
        return model

    values = whole(factory)
    assert is_deferred(build(factory, SEED))
    first, second = values["blocks.0.wide.weight"], values["blocks.1.wide.weight"]
    assert (first[0] == 7).all()
    assert (second[0, :2] == 14).all()
    assert torch.equal(first[:, 2:], second[:, 2:])


def test_tied_parameters_stay_tied():
    def factory():
        model = large_model()
        model.blocks[1].wide.weight = model.blocks[0].wide.weight
        return model

    model = build(factory, SEED)
    assert model.blocks[0].wide.weight is model.blocks[1].wide.weight


class Masked(Wide):
    """Has a large buffer, a large tensor that is no buffer, and large buffers made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(LARGE, LARGE)))
        self.register_buffer("table", self.mask * 2, persistent=False)
        self.noise = torch.randn(LARGE, LARGE)

    def forward(self, x):
        return super().forward(x) * self.table[-1, 0] + self.mask[0, -1] + self.noise[0, 0]


def masked():
    return Regression([Masked() for _ in range(2)])


def test_large_buffers_have_their_values():
    model = build(masked, SEED)
    assert is_deferred(model)
    for block in model.blocks:
        assert torch.equal(block.mask, torch.tril(torch.ones(LARGE, LARGE)))
        assert torch.equal(block.table, 2 * block.mask)
        assert 0.9 < block.noise.std() < 1.1


def test_models_with_large_buffers_train():
    engine = engine_alone(masked, 2, 1)
    assert engine.step(vectors(2, torch.Generator().manual_seed(0))).isfinite()


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight.std().item(),
        lambda weight: weight.tolist(),
        lambda weight: weight.detach().numpy(),
        lambda weight: bool((weight > 0).any()),
        lambda weight: weight[weight > 0],
    ],
)
def test_a_constructor_that_reads_large_values_is_run_as_usual(read):
    def factory():
        model = large_model()
        read(model.blocks[0].wide.weight)
        return model

    model = build(factory, SEED)
    assert not is_deferred(model)
    again = build(factory, SEED)
    assert torch.equal(model.blocks[0].wide.weight, again.blocks[0].wide.weight)


def test_small_values_that_go_into_a_large_weight_are_deferred_with_it():
    def factory():
        model = large_model()
        weight = model.blocks[0].wide.weight
        weight.data[0] = 7.0  # torch puts the 7 on the meta device
        weight.data[1] = torch.arange(weight.shape[1]).float()
        model.small = nn.Linear(2, 3).to(weight.device)  # as adapters follow their layer
        return model

    assert is_deferred(build(factory, SEED))
    first, again = whole(factory), whole(factory)
    weight = first["blocks.0.wide.weight"]
    assert (weight[0] == 7).all() and weight[1].tolist() == list(range(weight.shape[1]))
    assert 0 < weight[2:].std() < 1
    assert first["small.weight"].abs().max() > 0
    for name, values in first.items():
        assert torch.equal(values, again[name]), name


def reads_values():
    model = large_model()
    model.scale = model.blocks[0].wide.weight.std().item()
    return model


def test_errors_of_a_constructor_come_out():
    def factory():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        build(factory, SEED)


def test_blocks_on_plain_modules_are_initialised_by_them():
    values = whole(lambda: Regression([Block()]))
    bound = 1 / math.sqrt(WIDTH)
    assert values["blocks.0.qkv.weight"].abs().max() <= bound
    assert (values["blocks.0.norm.weight"] == 1).all()
