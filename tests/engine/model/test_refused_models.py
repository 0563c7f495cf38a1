"""What a model must not do is told with the unit's name, before anything wrong is learned."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.known_losses import known_loss
from helpers.training.models import ARCHITECTURES, Block, InOrder, Regression, vectors
from helpers.training.reference import (
    Share,
    batches,
    engine_alone,
    engine_for,
    initialised,
    optimizer_for,
    own_rows,
)


def step(factory, samples=4, micro_batch=2, **settings):
    engine = engine_alone(factory, samples, micro_batch, **settings)
    return engine.step(vectors(samples, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    "order, message",
    [
        ([0, 2, 1], {"code": "unit-order-changed", "what": "blocks.1"}),
        ([0, 1, 2, 2], {"code": "unit-order-changed", "what": "blocks.2"}),
    ],
)
def test_another_order_than_the_plans(order, message):
    with raises(ModelError, **message):
        step(lambda: InOrder(3, order))


def test_an_order_that_depends_on_the_batch():
    class Depends(InOrder):
        def forward(self, x, target):
            self.order = [0, 1, 2] if len(x) == 2 else [0, 2, 1]
            return super().forward(x, target)

    with raises(ModelError, code="unit-order-changed", what="blocks.1"):
        step(lambda: Depends(3, []), samples=3)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        x += self.block(x)
        return x


def test_a_unit_that_writes_into_its_input():
    with raises(ModelError, code="unit-input-overwritten", what="blocks.0"):
        step(lambda: Regression([Writes() for _ in range(2)]))


class WritesLater(Regression):
    def forward(self, x, target):
        x = self.enter(x)
        y = self.blocks[0](x)
        x *= 2
        return self.error(self.blocks[1](x + y), target)


def test_a_model_that_writes_into_a_units_input_after_the_call():
    with raises(ModelError, code="unit-input-overwritten", what="blocks.0"):
        step(lambda: WritesLater([Block(), Block()]))


@dataclass
class State:
    x: Tensor


class Boxed(nn.Module):
    """Takes or gives tensors in an object that nobody can look into."""

    def __init__(self, takes, gives):
        super().__init__()
        self.block = Block()
        self.takes, self.gives = takes, gives

    def forward(self, x):
        x = self.block(x.x if self.takes else x)
        return State(x) if self.gives else x


class Boxes(Regression):
    def forward(self, x, target):
        x = self.enter(x)
        for block in self.blocks:
            x = block(State(x) if block.takes else x)
            x = x.x if block.gives else x
        return self.error(x, target)


@pytest.mark.parametrize(
    "takes, gives, verb", [(True, False, "is given"), (False, True, "returns")]
)
def test_tensors_hidden_in_objects(takes, gives, verb):
    with raises(ModelError, code="unit-container-unsupported", what=("blocks.0", verb)):
        step(lambda: Boxes([Boxed(takes, gives) for _ in range(2)]))


def test_caches_are_off_in_a_step_and_as_they_were_after_it():
    def loss(model, batch):
        assert model.config.use_cache is False
        return known_loss(model)(model, batch)

    engine = engine_alone(ARCHITECTURES["llama"].factory, 2, 1, loss=loss)
    batch = next(batches(ARCHITECTURES["llama"], 2, 1))
    engine.step(batch)
    assert engine.model.config.use_cache is True, "so it is saved"


class OwnCache:
    """It remembers, and says nothing of how much."""


class Caching(Regression):
    def forward(self, x, target):
        x, cache = self.enter(x), OwnCache()
        for block in self.blocks:
            x = block(x, cache)
        return self.error(x, target)


class IgnoresCache(Block):
    def forward(self, x, cache):
        return super().forward(x)


def test_caches_that_cannot_be_looked_into_are_refused():
    with raises(ModelError, code="unit-input-unsupported", what=("blocks.0", "OwnCache")):
        step(lambda: Caching([IgnoresCache()]))


def test_a_models_own_recompute_is_switched_off():
    def factory():
        model = ARCHITECTURES["llama"].factory()
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:  # its older name
            model.gradient_checkpointing_enable()
        assert model.model.layers[0].gradient_checkpointing
        return model

    def loss(model, batch):
        assert not model.model.layers[0].gradient_checkpointing
        return known_loss(model)(model, batch)

    engine = engine_alone(factory, 2, 1, loss=loss)
    engine.step(next(batches(ARCHITECTURES["llama"], 2, 1)))
    assert engine.model.model.layers[0].gradient_checkpointing


def test_a_loss_that_depends_on_nothing_that_is_trained():
    class Blind(Regression):
        def forward(self, x, target):
            loss, count = super().forward(x, target)
            return loss.detach(), count

    with raises(ModelError, code="loss-without-parameters"):
        step(lambda: Blind([Block(), Block()]))


def test_errors_of_the_model_come_out_as_they_are():
    class Broken(Regression):
        def forward(self, x, target):
            raise ZeroDivisionError("the model's own")

    with pytest.raises(ZeroDivisionError, match="the model's own"):
        step(lambda: Broken([Block(), Block()]))


class Fragile(Regression):
    """Fails in its last micro-batch, between two units, while `broken`."""

    broken = False

    def __init__(self):
        super().__init__([Block(), Block()])

    def forward(self, x, target):
        x = self.blocks[0](self.enter(x))
        if self.broken and len(x) == 1:
            raise ValueError("once")
        return self.error(self.blocks[1](x), target)


@pytest.mark.parametrize("action", ["step", "evaluate"])
def test_after_an_error_training_goes_on(action):
    batch = vectors(3, torch.Generator().manual_seed(0))
    losses = []
    for fails in (False, True):
        engine = engine_alone(Fragile, 3, 2)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        engine.step(batch)
        if fails:
            engine.model.broken = True
            with pytest.raises(ValueError, match="once"):
                getattr(engine, action)(batch)
            engine.model.broken = False
        optimizer.step()
        losses.append(engine.step(batch).item())
    assert losses[0] == losses[1]


class WeightOfABlockInTheHead(nn.Module):
    """Its head uses the weight of its first block, with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x
        for block in self.blocks:
            x = block(x)
        decay = self.blocks[0][0].weight.square().sum() * len(first)
        return (x.square().sum() + decay, torch.tensor(len(first)))


@pytest.mark.parametrize(
    "stage, order", [(n, "layered") for n in range(4)] + [(0, "sequential"), (1, "sequential")]
)
def test_a_blocks_weight_outside_of_the_block_is_right_or_refused(stage, order):
    batch = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}
    plain = initialised(WeightOfABlockInTheHead)
    total, count = plain(**batch)
    (total / count).backward()
    mode = Mode(order=order)
    engine = engine_alone(WeightOfABlockInTheHead, 4, 2, mode=mode, zero_stage=stage)
    try:
        engine.step(batch)
    except ModelError as error:
        assert "outside of the unit" in error.what or "is used while its unit" in error.what
        return
    found = {piece.name: piece.local.grad for piece in engine.pieces()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad.flatten())


class WeightOfABlockAhead(Regression):
    """Its loss has a factor from the weight of its first block, read before the block is called."""

    def __init__(self):
        super().__init__([Block() for _ in range(2)])

    def forward(self, x, target):
        factor = next(self.blocks[0].parameters()).detach().abs().sum()
        loss, count = super().forward(x, target)
        return loss * factor, count


AHEAD_SHARES = [Share(3, 2, 1), Share(1, 1, 2)]


def _two_steps_ahead(stage):
    engine = engine_for(WeightOfABlockAhead, AHEAD_SHARES, zero_stage=stage)
    optimizer = optimizer_for(engine.parameters())
    bucket = engine._parts.units["blocks.0"].bucket
    if dist.get_rank() == 0:  # its part of the weight comes late to the other rank
        gather = bucket.start_gather
        bucket.start_gather = lambda: (time.sleep(0.3), gather())
    losses = []
    for _ in range(2):
        batch = vectors(4, torch.Generator().manual_seed(0))
        try:
            losses.append(engine.step(own_rows(batch, AHEAD_SHARES, dist.get_rank())).item())
        except GpumixError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", left_out(range(4), range(3)))
def test_a_blocks_weight_that_is_still_on_its_way_is_not_read(stage):
    plain = initialised(WeightOfABlockAhead)
    optimizer, expected = optimizer_for(plain.parameters()), []
    for _ in range(2):
        total, count = plain(**vectors(4, torch.Generator().manual_seed(0)))
        expected.append((total / count).item())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    for told in run_ranks(_two_steps_ahead, 2, stage, timeout_s=60):
        if isinstance(told, str):
            assert "is used while its unit is not computed" in told
        else:
            assert told == pytest.approx(expected, rel=1e-5)
