"""What is in memory during a step, and that nothing is left after it."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpumix.engine.engine import Engine
from gpumix.engine.sharding.absent_parameter import AbsentParameter, MasterParameter
from gpumix.schema.plan.stage import Mode
from helpers.extended import left_out
from helpers.training.memory import assert_no_tensor_waits_for_the_collector, count_tensors
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import batches, engine_alone

GPT2 = ARCHITECTURES["gpt2"]


@pytest.fixture(scope="module", autouse=True)
def what_was_there_is_not_looked_at():
    """All that tests before these imported and made is gone through once, not at each count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_two_units_are_gathered_at_a_time_and_two_have_gradients():
    engine = engine_alone(GPT2.factory, 4, 2)
    units = [unit.bucket.groups[0] for unit in engine._parts.units.values()]
    for buffers in ([g.full for g in units], [g.gradient for g in units]):
        own = [buffer.untyped_storage().data_ptr() for buffer in buffers]
        assert len(set(own)) == 2
        assert all(a != b for a, b in pairwise(own))


def present(engine: Engine) -> set[str]:
    """Units whose parameters are gathered, or on their way."""
    units = engine._parts.units.items()
    for _, unit in units:
        here = not any(
            isinstance(p, AbsentParameter | MasterParameter) for p in unit.module.parameters()
        )
        assert not here or unit.bucket._gathering is not None
    return {name for name, unit in units if unit.bucket._gathering is not None}


@pytest.mark.parametrize("action", ["step", "evaluate"])
def test_no_parameters_stay(action):
    engine = engine_alone(GPT2.factory, 4, 2)
    assert not present(engine)
    getattr(engine, action)(next(batches(GPT2, 4, 1)))
    assert not present(engine)


def test_a_unit_and_the_next_are_gathered_at_a_time():
    engine = engine_alone(GPT2.factory, 4, 2)
    seen = []
    for unit in engine._parts.units.values():
        inner = unit.forward

        def forward(*args, inner=inner, name=unit.name, **kwargs):
            seen.append((name[-1], present(engine)))
            return inner(*args, **kwargs)

        unit.forward = forward
    engine.step(next(batches(GPT2, 4, 1)))
    h = [f"transformer.h.{i}" for i in range(3)]
    forward = [("0", {*h[:2]}), ("1", {*h[1:]}), ("2", {h[2]})]
    backward = [("2", {*h[1:]}), ("1", {*h[:2]}), ("0", {h[0]})]
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


@pytest.mark.parametrize("boundary", ["device", "host"])
def test_inputs_on_the_host_are_not_on_the_device_too(boundary):
    inputs: list[StorageWeakRef] = []
    alive = []

    def loss(model, batch):
        result = model(**batch)
        alive.append(sum(not storage.expired() for storage in inputs))
        return result.loss, torch.tensor(1)

    engine = engine_alone(GPT2.factory, 2, 2, mode=Mode(boundary=boundary), loss=loss)
    for unit in engine._parts.units.values():

        def forward(hidden, *args, inner=unit.forward, **kwargs):
            inputs.append(StorageWeakRef(hidden.untyped_storage()))
            return inner(hidden, *args, **kwargs)

        unit.forward = forward
    engine.step(next(batches(GPT2, 2, 1)))
    assert alive == [len(engine.plan.stages[0].units) if boundary == "device" else 0]


@pytest.mark.parametrize("name", left_out(["gpt2", "t5", "mixtral"], ["t5", "mixtral"]))
def test_no_tensor_waits_for_the_garbage_collector(name):
    engine = engine_alone(ARCHITECTURES[name].factory, 4, 2)
    batch = next(batches(ARCHITECTURES[name], 4, 1))

    assert_no_tensor_waits_for_the_collector(engine, batch)


@pytest.mark.parametrize("name", left_out(["gpt2", "mixtral"], ["mixtral"]))
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
