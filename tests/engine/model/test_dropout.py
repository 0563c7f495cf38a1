"""Dropout: the recompute draws the masks of the forward pass; nobody else's numbers change."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from gpumix.engine.engine import Engine
from gpumix.engine.model.forward_coroutine import ModelError, Randomness
from gpumix.engine.model.rng import OtherGenerators, get_generators, preserve_all_rng
from helpers.errors import raises
from helpers.training.models import WIDTH, Block, Regression, gpt2, packed_lm, vectors
from helpers.training.reference import (
    Share,
    assert_gradients_equal,
    engine_alone,
    initialised,
    joined,
    pieces_of,
    step_on_ranks,
)

SEED = 0


def dropping():
    return Regression([Block(dropout=0.3) for _ in range(3)])


class Masks(nn.Module):
    """Draws what it leaves out as some models of speech do, by no generator of torch's."""

    def __init__(self, draws) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, x):
        return x * torch.tensor([self.draws() > 0.3 for _ in range(x.shape[-1])])


def masking(draws):
    def factory():
        model = dropping()
        for block in model.blocks:
            for name, module in block.named_modules():
                if isinstance(module, nn.Dropout):
                    block.set_submodule(name, Masks(draws))
        return model

    return factory


KINDS = {"torch": dropping, "numpy": masking(np.random.rand), "Python": masking(random.random)}


def seed_as_the_engine(model, step, position):
    """Hooks that seed a plain model's generator where the engine does."""
    others = OtherGenerators()
    others.are_used = True
    randomness = Randomness(SEED, step, position, get_generators(torch.device("cpu")), others)
    handles = []
    for number, block in enumerate(model.blocks):
        inside, after = 2 * number + 1, 2 * number + 2
        handles += [
            block.register_forward_pre_hook(lambda *_, n=inside: randomness.start(n)),
            block.register_forward_hook(lambda *_, n=after: randomness.start(n)),
        ]
    randomness.start(0)
    return handles


def plain_gradients(batch, sizes, factory=dropping):
    """Gradients of plain autograd, which keeps the graph and hence the masks."""
    model = initialised(factory)
    position, count = 0, batch["target"].numel()
    for size in sizes:
        handles = seed_as_the_engine(model, step=0, position=position)
        loss, _ = model(**{k: v[position : position + size] for k, v in batch.items()})
        (loss / count).backward()
        position += size
        for handle in handles:
            handle.remove()
    return {n: p.grad.numpy() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_a_kept_graph_with_the_same_masks(kind):
    batch = vectors(5, torch.Generator().manual_seed(1))
    engine = engine_alone(KINDS[kind], 5, 2)
    engine.step(batch)
    assert engine._others.are_used == (kind != "torch")
    with preserve_all_rng():
        expected = plain_gradients(batch, (2, 2, 1), KINDS[kind])
    assert_gradients_equal(joined([pieces_of(engine, gradients=True)]), expected)


def test_a_unit_that_draws_by_a_generator_of_its_own_is_refused():
    """Its plan cuts no batch, and nothing is rehearsed: the step itself shows it."""
    generator = np.random.default_rng(1)
    engine = engine_alone(masking(generator.random), 5, 5)
    with raises(ModelError, code="recompute-differs") as caught:
        engine.step(vectors(5, torch.Generator().manual_seed(1)))
    assert caught.value.why == "what it returns has other values then"


class ReturnsMore(nn.Module):
    """Saves the same whenever it runs, and returns one number more each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.inner(x), torch.zeros(self.runs)


class FirstOfTwo(Regression):
    def __init__(self) -> None:
        super().__init__([ReturnsMore() for _ in range(2)])

    def forward(self, x, target):
        x = self.enter(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.error(x, target)


def test_a_unit_that_returns_other_shapes_when_it_is_run_again_is_refused():
    engine = engine_alone(FirstOfTwo, 5, 5)
    with raises(ModelError, code="recompute-differs") as caught:
        engine.step(vectors(5, torch.Generator().manual_seed(1)))
    assert caught.value.why == "what it returns has other values then"


def gradient_of(engine: Engine, batch) -> np.ndarray:
    for parameter in engine.parameters():
        parameter.grad = None
    engine.step(batch)
    return np.concatenate([p.grad.numpy().reshape(-1) for p in engine.parameters()])


def test_the_same_step_of_the_same_plan_draws_the_same_numbers():
    batch = packed_lm(4, torch.Generator().manual_seed(1))
    first, again = (gradient_of(engine_alone(gpt2(0.2), 4, 2), batch) for _ in range(2))
    assert np.array_equal(first, again)


def test_every_step_draws_other_numbers():
    batch = packed_lm(4, torch.Generator().manual_seed(1))
    engine = engine_alone(gpt2(0.2), 4, 2)
    first, second = (gradient_of(engine, batch) for _ in range(2))
    assert not np.allclose(first, second, rtol=1e-2)


def test_every_micro_batch_draws_other_numbers():
    one = vectors(1, torch.Generator().manual_seed(1))
    losses = []
    engine = engine_alone(dropping, 2, 1, loss=lambda model, batch: _noted(model, batch, losses))
    engine.step({k: v.repeat(2, 1, 1) for k, v in one.items()})
    assert losses[0] != losses[1]


def _noted(model, batch, losses):
    loss, count = model(**batch)
    losses.append(loss.item())
    return loss, count


def test_the_callers_random_numbers_go_on_as_if_nothing_was():
    engine = engine_alone(dropping, 4, 2)
    batch = vectors(4, torch.Generator().manual_seed(1))
    expected = _drawn(5)
    _seed(5)
    engine.step(batch)
    engine.evaluate(batch)
    assert _drawn() == expected


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _drawn(seed: int | None = None) -> list[float]:
    if seed is not None:
        _seed(seed)
    return [*torch.rand(3).tolist(), np.random.rand(), random.random()]


def test_masks_follow_the_place_in_the_global_batch_not_the_rank():
    batch = vectors(5, torch.Generator().manual_seed(1))
    _, found = step_on_ranks(dropping, [Share(2, 2, 1), Share(3, 2, 2)], batch)
    with preserve_all_rng():
        expected = plain_gradients(batch, (2, 2, 1))
    assert_gradients_equal(found, expected)
