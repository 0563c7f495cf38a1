"""What a model switches on around its units: gradient mode, autocast, context variables."""

from __future__ import annotations

import contextvars
import weakref

import pytest
import torch
from torch import nn

from helpers.training.models import Block, Regression, vectors
from helpers.training.reference import (
    assert_gradients_equal,
    assert_step_is_plain,
    engine_alone,
    initialised,
    joined,
    pieces_of,
)


class FrozenBottom(Regression):
    """Runs its first blocks without gradients."""

    def __init__(self):
        super().__init__([Block() for _ in range(4)])

    def forward(self, x, target):
        with torch.no_grad():
            x = self.enter(x)
            for block in self.blocks[:2]:
                x = block(x)
        for block in self.blocks[2:]:
            x = block(x)
        return self.error(x, target)


class Sandwich(Regression):
    """One block in the middle without gradients, beside a path that has them."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])

    def forward(self, x, target):
        x = self.blocks[0](self.enter(x))
        with torch.no_grad():
            y = self.blocks[1](x)
        return self.error(self.blocks[2](x + y), target)


@pytest.mark.parametrize("model", [FrozenBottom, Sandwich])
def test_units_without_gradients(model):
    batch = vectors(5, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(model, 5, 2), model, batch)


def test_units_without_gradients_keep_no_inputs():
    seen = []

    class Watched(FrozenBottom):
        def error(self, x, target):
            seen.append([alive() is None for alive in self.inputs])
            return super().error(x, target)

    def watch(module, args):
        engine.model.inputs.append(weakref.ref(args[0]))

    engine = engine_alone(Watched, 2, 2)
    engine.model.inputs = []
    for block in engine.model.blocks:
        block.register_forward_pre_hook(watch)
    engine.step(vectors(2, torch.Generator().manual_seed(0)))
    assert seen == [[True, True, False, False]]


class HalfInside(Regression):
    """Computes its blocks, and what is between, in bf16."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])

    def forward(self, x, target):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
                assert torch.is_autocast_enabled("cpu")
        return self.error(x.float(), target)


def train(engine_or_model, step):
    parameters = list(engine_or_model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
    return losses


def test_autocast_inside_a_model():
    batch = vectors(6, torch.Generator().manual_seed(0))
    model = initialised(HalfInside)

    def plain():
        loss, count = model(**batch)
        (loss / count).backward()
        return (loss / count).item()

    engine = engine_alone(HalfInside, 6, 2)
    losses = train(engine, lambda: engine.step(batch).item())
    assert losses == pytest.approx(train(model, plain), rel=2e-3)
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    assert_gradients_equal(joined([pieces_of(engine, gradients=True)]), expected, tolerance=0.05)


def test_the_callers_state_is_untouched():
    batch = vectors(4, torch.Generator().manual_seed(0))
    for model in (HalfInside, FrozenBottom):
        engine = engine_alone(model, 4, 2)
        with torch.no_grad():
            engine.step(batch)
            assert not torch.is_grad_enabled()
        engine.evaluate(batch)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


def test_a_step_trains_under_the_callers_no_grad():
    batch = vectors(4, torch.Generator().manual_seed(0))
    engine = engine_alone(HalfInside, 4, 2)
    with torch.no_grad():
        engine.step(batch)
    assert all(p.grad is not None for p in engine.parameters())


DEPTH = contextvars.ContextVar("DEPTH", default=0)


class Reading(nn.Module):
    """A block that is told by a context variable how large its input is."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x) * DEPTH.get()


class SetsContext(Regression):
    """Sets a context variable of its own; other micro-batches run before it is reset."""

    def __init__(self):
        super().__init__([Reading() for _ in range(3)])

    def forward(self, x, target):
        token = DEPTH.set(len(x))
        y = self.enter(x)
        for block in self.blocks:
            y = block(y) / len(x)
            assert DEPTH.get() == len(x)
        DEPTH.reset(token)
        return self.error(y, target)


def test_context_variables_are_each_micro_batchs_own():
    batch = vectors(5, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(SetsContext, 5, 3), SetsContext, batch)
    assert DEPTH.get() == 0
