"""What is in memory during a step, and that nothing is left after it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gpumix.engine.engine import Engine
from gpumix.engine.units import ROOT
from memory import count_tensors
from models import ARCHITECTURES
from reference import batches, engine_alone

GPT2 = ARCHITECTURES["gpt2"]


def gathered(engine: Engine) -> set[str]:
    return {g.label for g in engine.groups() if g.full.untyped_storage().nbytes()}


def with_gradient(engine: Engine) -> set[str]:
    return {g.label for g in engine.groups() if g.gradient.untyped_storage().nbytes()}


@pytest.mark.parametrize("action", ["step", "evaluate"])
def test_no_parameters_and_no_gradient_buffers_stay(action):
    engine = engine_alone(GPT2.factory, 4, 2)
    assert not gathered(engine)
    getattr(engine, action)(next(batches(GPT2, 4, 1)))
    assert not gathered(engine)
    assert not with_gradient(engine)


def test_a_unit_and_the_next_are_gathered_at_a_time():
    engine = engine_alone(GPT2.factory, 4, 2)
    seen = []
    for unit in engine._parts.units.values():
        inner = unit.forward

        def forward(*args, inner=inner, name=unit.name, **kwargs):
            seen.append((name[-1], gathered(engine), with_gradient(engine)))
            return inner(*args, **kwargs)

        unit.forward = forward
    engine.step(next(batches(GPT2, 4, 1)))
    h = [f"transformer.h.{i}" for i in range(3)]
    forward = [
        ("0", {ROOT, *h[:2]}, set()),
        ("1", {ROOT, *h[1:]}, set()),
        ("2", {ROOT, h[2]}, set()),
    ]
    # backward: one unit's gradient is reduced while the one before it is computed
    backward = [
        ("2", {ROOT, *h[1:]}, {ROOT, h[2]}),
        ("1", {ROOT, *h[:2]}, {ROOT, *h[1:]}),
        ("0", {ROOT, h[0]}, {ROOT, *h[:2]}),
    ]
    assert seen == [moment for moment in forward + backward for _ in range(2)]


def test_logits_of_one_micro_batch_are_alive_at_a_time():
    alive: list[weakref.ref] = []

    def loss(model, batch):
        result = model(**batch)
        assert all(logits() is None for logits in alive)
        alive.append(weakref.ref(result.logits))
        return result.loss, torch.tensor(1)

    engine = engine_alone(GPT2.factory, 6, 2, loss=loss)
    engine.step(next(batches(GPT2, 6, 1)))
    assert len(alive) == 3


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_no_tensor_waits_for_the_garbage_collector(name):
    engine = engine_alone(ARCHITECTURES[name].factory, 4, 2)
    batch = next(batches(ARCHITECTURES[name], 4, 1))

    engine.step(batch)
    gc.collect()
    gc.disable()
    try:
        before = count_tensors()
        engine.step(batch)
        engine.evaluate(batch)
        assert count_tensors() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_step_that_fails_leaves_no_tensor(name):
    def loss(model, batch):
        result = model(**batch)
        if fails:
            raise MemoryError
        return result.loss, torch.tensor(1)

    fails = False
    engine = engine_alone(ARCHITECTURES[name].factory, 4, 2, loss=loss)
    batch = next(batches(ARCHITECTURES[name], 4, 1))
    engine.step(batch)
    gc.collect()
    before = count_tensors()
    fails = True
    with pytest.raises(MemoryError):
        engine.step(batch)
    gc.collect()
    assert count_tensors() == before
