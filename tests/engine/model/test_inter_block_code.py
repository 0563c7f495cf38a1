"""What a model does between its units: skips, shared values, several inputs and outputs."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from helpers.extended import left_out
from helpers.training.models import WIDTH, Block, Regression, vectors
from helpers.training.reference import assert_step_is_plain, engine_alone

Pair = namedtuple("Pair", "x y")


class LongSkip(Regression):
    """From the embedding past all blocks to the head."""

    def forward(self, x, target):
        first = x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.error(x + first.tanh(), target)


class UShape(Regression):
    """Each block of the second half takes what its twin of the first half gave."""

    def __init__(self):
        super().__init__([Block() for _ in range(4)])

    def forward(self, x, target):
        x = self.enter(x)
        a = self.blocks[0](x)
        b = self.blocks[1](a)
        c = self.blocks[2](b + a.sin())
        d = self.blocks[3](torch.cat([c, a], dim=1)[:, : x.shape[1]] * x)
        return self.error(d * b, target)


class Cross(nn.Module):
    """A block that also looks at other values, and scales by a third."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory=None, *, scale=None, flag=True, names=()):
        assert flag
        x = self.block(x)
        if memory is not None:
            x = x + self.other(memory)
        return x if scale is None else x * scale


class EncoderDecoder(Regression):
    """The encoder's output goes to all decoder blocks, through a norm and raw."""

    def __init__(self):
        super().__init__([Cross() for _ in range(5)])
        self.middle = nn.LayerNorm(WIDTH)

    def forward(self, x, target):
        x = raw = self.enter(x)
        for block in self.blocks[:2]:
            x = block(x)
        memory, y = self.middle(x), raw.flip(1)
        y = self.blocks[2](y, memory)
        y = self.blocks[3](y, memory=memory * 2)
        y = self.blocks[4](y, memory)
        return self.error(y, target)


class SharedGlue(Regression):
    """Every block is given values that come from one trained graph, sliced differently."""

    def __init__(self):
        super().__init__([Cross() for _ in range(4)])
        self.bias = nn.Parameter(torch.randn(4, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, target):
        x = self.enter(x)
        table = self.mix(self.bias).tanh()
        for block, row in zip(self.blocks, table):
            x = block(x * row.exp(), memory=row.expand_as(x), scale=row.sigmoid())
        return self.error(x + table.sum(), target)


class Chain(Regression):
    """A value given to one block is made from a value given to another, without a unit between."""

    def __init__(self):
        super().__init__([Cross() for _ in range(3)])

    def forward(self, x, target):
        first = self.enter(x)
        second = first.sin() * first
        third = second.cos() * first
        x = self.blocks[0](first, second)
        x = self.blocks[1](x, third)
        x = self.blocks[2](x, second)
        return self.error(x + third, target)


class RootParameterAsInput(Regression):
    """A parameter of the root is given to the blocks as it is."""

    def __init__(self):
        super().__init__([Cross() for _ in range(3)])
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.1))

    def forward(self, x, target):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.error(x, target)


class RootParameterAsInputOnce(RootParameterAsInput):
    """Of one block only."""

    def forward(self, x, target):
        x = self.blocks[0](self.enter(x))
        return self.error(self.blocks[2](self.blocks[1](x, scale=self.scale)), target)


class Many(nn.Module):
    """Takes and gives nested structures with numbers, strings and None among the tensors."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, state):
        x = self.block(state["x"])
        pair = Pair(x, state["pair"].y + 1)
        return {"x": x.relu(), "pair": pair, "n": [state["n"][0] + 1, None, "word"]}, x, None


class Structures(Regression):
    def __init__(self):
        super().__init__([Many() for _ in range(3)])

    def forward(self, x, target):
        x = self.enter(x)
        state = {"x": x, "pair": Pair(None, torch.zeros(len(x), dtype=torch.long)), "n": [0]}
        for block in self.blocks:
            state, _unused, _ = block(state)
        assert state["n"] == [3, None, "word"]
        assert (state["pair"].y == 3).all()
        return self.error(state["x"] + state["pair"].x, target)


class Identity(nn.Module):
    """Gives back what it was given, beside its result, and the result twice."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        y = self.block(x)
        return y, x, y


class Aliases(Regression):
    def __init__(self):
        super().__init__([Identity() for _ in range(3)])

    def forward(self, x, target):
        x = self.enter(x)
        for block in self.blocks:
            y, same, again = block(x)
            x = y + same.tanh() + again**2
        return self.error(x, target)


class InPlaceOnOutputs(Regression):
    """Writes into what a block gave, as deep visual features are added to a decoder's states."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])

    def forward(self, x, target):
        x = extra = self.enter(x)
        for block in self.blocks:
            x = block(x)
            x[:, ::2] += extra[:, ::2].tanh()
            x *= 1.5
        return self.error(x, target)


class UnusedOutput(Regression):
    """Nobody looks at what the last block gave, and one input is no part of the loss."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])

    def forward(self, x, target):
        x = self.enter(x)
        y = self.blocks[0](x)
        z = self.blocks[1](y)
        self.blocks[2](z)
        return self.error(z, target)


class Positions(nn.Module):
    """Only whole numbers come in; nothing that comes in wants a gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.block = Block()

    def forward(self, positions):
        return self.block(self.table(positions))


class WholeNumbers(Regression):
    def __init__(self):
        super().__init__([Positions() for _ in range(2)])

    def forward(self, x, target):
        positions = torch.arange(x.shape[1]).expand(len(x), -1)
        y = self.blocks[0](positions) * self.blocks[1](positions + 20)
        return self.error(self.enter(x) + y, target)


class SumOfAll(Regression):
    """All that the blocks give goes to the head, as a stack that is summed: autograd has one tensor
    for the gradients of all of them."""

    def __init__(self):
        super().__init__([Block() for _ in range(4)])

    def forward(self, x, target):
        x, states = self.enter(x), []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return self.error(torch.stack(states).sum(0), target)


class Sum(nn.Module):
    """Takes a stack that is summed, too."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, *values):
        return self.block(torch.stack(values).sum(0))


class SumsOfAll(Regression):
    """Each block is given all that earlier ones gave; the last one their sum."""

    def __init__(self):
        super().__init__([Sum() for _ in range(5)])

    def forward(self, x, target):
        states = [self.enter(x)]
        for block in self.blocks[:-1]:
            states.append(block(*states))
        return self.error(self.blocks[-1](torch.stack(states).sum(0)), target)


MODELS = [
    LongSkip,
    SumOfAll,
    SumsOfAll,
    UShape,
    EncoderDecoder,
    SharedGlue,
    Chain,
    RootParameterAsInput,
    RootParameterAsInputOnce,
    Structures,
    Aliases,
    InPlaceOnOutputs,
    UnusedOutput,
    WholeNumbers,
]


def factory_of(model):
    return (lambda: model([Block() for _ in range(3)])) if model is LongSkip else model


@pytest.mark.parametrize("micro_batch", [2, 5])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_plain(model, micro_batch):
    batch = vectors(5, torch.Generator().manual_seed(0))
    engine = engine_alone(factory_of(model), 5, micro_batch)
    assert_step_is_plain(engine, factory_of(model), batch)


FURTHER = [SharedGlue, SumsOfAll, UShape, LongSkip, InPlaceOnOutputs]


@pytest.mark.parametrize("model", left_out(MODELS, FURTHER))
def test_two_steps_leave_nothing_behind(model):
    batch = vectors(5, torch.Generator().manual_seed(0))
    engine = engine_alone(factory_of(model), 5, 2)
    engine.step(batch)
    for parameter in engine.parameters():
        parameter.grad = None
    assert_step_is_plain(engine, factory_of(model), batch)
