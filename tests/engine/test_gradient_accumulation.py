"""Gradients of several steps add up until they are zeroed, as plain PyTorch's do."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.training.models import ARCHITECTURES
from helpers.training.reference import batches, engine_alone, initialised, mean_loss

GPT2 = ARCHITECTURES["gpt2"]


def gradients(engine):
    return {n: p.grad.numpy().reshape(-1).copy() for n, p in engine.named_parameters()}


def expected_after(steps):
    """Plain gradients of the batches in `steps`, added up."""
    model = initialised(GPT2.factory)
    for step, batch in enumerate(batches(GPT2, 4, 3)):
        if step in steps:
            mean_loss(model, batch).backward()
    return {n: p.grad.numpy().reshape(-1) for n, p in model.named_parameters()}


def assert_close(found, expected):
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-6, err_msg=name)


def test_steps_add_up():
    engine = engine_alone(GPT2.factory, 4, 3)
    for batch in batches(GPT2, 4, 3):
        engine.step(batch)
    assert_close(gradients(engine), expected_after({0, 1, 2}))


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroed_gradients_start_anew(to_none):
    engine = engine_alone(GPT2.factory, 4, 3)
    for batch in batches(GPT2, 4, 3):
        for parameter in engine.parameters():
            if to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        engine.step(batch)
    assert_close(gradients(engine), expected_after({2}))


def test_each_parameter_starts_anew_when_it_is_zeroed():
    engine = engine_alone(GPT2.factory, 4, 3)
    kept = {name for i, (name, _) in enumerate(engine.named_parameters()) if i % 2 == 0}
    for batch in batches(GPT2, 4, 3):
        for name, parameter in engine.named_parameters():
            if name not in kept:
                parameter.grad = None
        engine.step(batch)
    summed, last = expected_after({0, 1, 2}), expected_after({2})
    expected = {n: summed[n] if n in kept else last[n] for n in summed}
    assert_close(gradients(engine), expected)
