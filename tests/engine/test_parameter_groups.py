"""Parameter groups by the model's own names, and optimizers that know only some parameters."""

from __future__ import annotations

import torch

from models import ARCHITECTURES
from reference import (
    batches,
    engine_alone,
    initialised,
    joined,
    mean_loss,
    pieces_of,
    tensor_errors,
)

GPT2 = ARCHITECTURES["gpt2"]
STEPS = 3


def decayed(name: str) -> bool:
    return name.endswith("weight") and "ln_" not in name


def grouped(named_parameters):
    named = list(named_parameters)
    return torch.optim.SGD(
        [
            {"params": [p for n, p in named if decayed(n)], "weight_decay": 0.1},
            {"params": [p for n, p in named if not decayed(n)], "lr": 0.01},
        ],
        lr=0.1,
        momentum=0.9,
    )


def only_head(named_parameters):
    """Knows the last norm and nothing else; the other parameters' gradients are never zeroed."""
    return torch.optim.SGD([p for n, p in named_parameters if "ln_f" in n], lr=0.1)


def trained_plainly(optimizer_of):
    model = initialised(GPT2.factory)
    optimizer = optimizer_of(model.named_parameters())
    for batch in batches(GPT2, 4, STEPS):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    return {n: p.detach().numpy() for n, p in model.named_parameters()}


def trained_by_engine(optimizer_of):
    engine = engine_alone(GPT2.factory, 4, 2)
    optimizer = optimizer_of(engine.named_parameters())
    for batch in batches(GPT2, 4, STEPS):
        optimizer.zero_grad()
        engine.step(batch)
        optimizer.step()
    return joined([pieces_of(engine)])


def test_names_are_the_models_own():
    engine = engine_alone(GPT2.factory, 4, 2)
    expected = {n for n, _ in GPT2.factory().named_parameters()}
    assert {n for n, _ in engine.named_parameters()} == expected
    assert engine.shapes() == {n: p.shape for n, p in GPT2.factory().named_parameters()}


def test_groups_train_as_they_do_plainly():
    errors = tensor_errors(trained_by_engine(grouped), trained_plainly(grouped))
    assert max(errors.values()) < 1e-5, errors


def test_an_optimizer_may_know_a_part_of_the_parameters():
    errors = tensor_errors(trained_by_engine(only_head), trained_plainly(only_head))
    assert max(errors.values()) < 1e-5, errors
