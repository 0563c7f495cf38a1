"""What units may return: gradients as of plain PyTorch, or an error with the name of the unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.training.models import WIDTH, Block, Regression, vectors
from helpers.training.reference import assert_step_is_plain, engine_alone

BATCH = 4


class Named(NamedTuple):
    x: Tensor
    extra: Tensor


@dataclass
class Registered:
    x: Tensor
    extra: Tensor


register_dataclass(Registered)


@dataclass
class OwnOutput(ModelOutput):
    x: Tensor | None = None
    extra: Tensor | None = None


@dataclass(slots=True)
class Slotted:
    x: Tensor
    extra: Tensor


@dataclass
class Lists:
    x: list[Tensor]


class Returns(nn.Module):
    """Gives its result and a second one in a form of the model's choice."""

    def __init__(self, pack):
        super().__init__()
        self.block = Block()
        self.gate = nn.Linear(WIDTH, 1)
        self.pack = pack

    def forward(self, x):
        y = self.block(x)
        return self.pack(y, self.gate(y).sigmoid())


class Unpacks(Regression):
    def __init__(self, pack, unpack):
        super().__init__([Returns(pack), Returns(pack)])
        self.unpack = unpack

    def forward(self, x, target):
        x = self.enter(x)
        for block in self.blocks:
            y, gate = self.unpack(block(x))
            x = x + y * gate  # not scaled as a whole, which the norm would hide
        return self.error(x, target)


FORMS = {
    "tuple": (lambda y, g: (y, g), lambda o: o),
    "nested": (lambda y, g: {"a": [y], "b": (None, 3, g)}, lambda o: (o["a"][0], o["b"][2])),
    "named tuple": (Named, lambda o: (o.x, o.extra)),
    "registered dataclass": (Registered, lambda o: (o.x, o.extra)),
    "ModelOutput": (lambda y, g: OwnOutput(x=y, extra=g), lambda o: (o.x, o["extra"])),
    "partly filled ModelOutput": (
        lambda y, g: BaseModelOutput(last_hidden_state=y, attentions=(g,)),
        lambda o: (o[0], o.attentions[0]),
    ),
    "the same twice": (lambda y, g: (y, g, y), lambda o: (o[0] + o[2], o[1])),
    "beside numbers": (lambda y, g: (y, g, 1.5, "text"), lambda o: (o[0] * o[2], o[1])),
}


def batch():
    return vectors(BATCH, torch.Generator().manual_seed(0))


def assert_plain(factory):
    assert_step_is_plain(engine_alone(factory, BATCH, BATCH), factory, batch())


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_gradients_pass_through(form):
    assert_plain(lambda: Unpacks(*FORMS[form]))


def stepping(mode, zero_stage):
    def run(factory):
        engine_alone(factory, BATCH, 2, mode=mode, zero_stage=zero_stage).step(batch())

    return run


def evaluating(factory):
    engine_alone(factory, BATCH, 2).evaluate(batch())


STEPS = {
    "in layers": stepping(Mode(), 3),
    "in sequence": stepping(Mode(recompute=False, order="sequential"), 0),
    "in sequence, recomputed": stepping(Mode(order="sequential"), 0),
}
every_step = pytest.mark.parametrize("run", STEPS.values(), ids=STEPS)
every_use = pytest.mark.parametrize(
    "run", [*STEPS.values(), evaluating], ids=[*STEPS, "evaluating"]
)


HIDING = {
    "Slotted": (Slotted, lambda o: (o.x, o.extra)),
    "Lists": (lambda y, g: Lists([y, g]), lambda o: o.x),
    "set": (lambda y, g: {y, g}, lambda o: sorted(o, key=lambda t: -t.shape[-1])),
}


@every_step
@pytest.mark.parametrize("form", HIDING)
def test_forms_that_hide_tensors(form, run):
    with raises(ModelError, code="unit-container-unsupported", what=("blocks.0", form)):
        run(lambda: Unpacks(*HIDING[form]))


class Goes(nn.Module):
    """Returns what it is told, made of itself and its input."""

    def __init__(self, result):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.result = result

    def forward(self, x):
        return self.result(self, x)


class Uses(Regression):
    def __init__(self, result):
        super().__init__([Goes(result), Goes(result)])

    def forward(self, x, target):
        x = self.enter(x)
        for block in self.blocks:
            y = block(x)
            x = x + (y if isinstance(y, Tensor) else 1.0)
        return self.error(x, target)


@every_use
@pytest.mark.parametrize("nothing", [None, 2.0, (), {"a": "text"}])
def test_a_unit_that_returns_no_tensor(nothing, run):
    with raises(ModelError, code="unit-returns-no-tensor", what="blocks.0"):
        run(lambda: Uses(lambda unit, x: nothing))


@every_use
@pytest.mark.parametrize(
    "part", [lambda w: w, lambda w: w[:1], lambda w: w.T, lambda w: w.detach()]
)
def test_a_unit_that_returns_its_own_weights(part, run):
    """They are gone when the model gets them."""
    with raises(ModelError, code="unit-returns-parameter", what="blocks.0"):
        run(lambda: Uses(lambda unit, x: part(unit.linear.weight)))


RESULTS = {
    "a copy of its weights": lambda unit, x: unit.linear.weight.clone()[0],
    "its input": lambda unit, x: x,
    "a view of its input": lambda unit, x: x.flip(-1).transpose(0, 1).transpose(0, 1),
    "what has no gradient": lambda unit, x: unit.linear(x).detach(),
    "what its parameters do not reach": lambda unit, x: x.sin(),
    "whole numbers": lambda unit, x: (x > 0).long(),
}


@pytest.mark.parametrize("result", RESULTS)
def test_results_that_are_allowed(result):
    """Parameters that nothing depends on have a gradient of zero."""
    assert_plain(lambda: Uses(RESULTS[result]))


class WritesMask(nn.Module):
    """Writes into an input that wants no gradient."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, mask):
        mask.fill_(1.0)
        return self.block(x) * mask


class WithMask(Regression):
    def __init__(self):
        super().__init__([WritesMask(), WritesMask()])

    def forward(self, x, target):
        x, mask = self.enter(x), torch.zeros(len(x), 1, 1)
        for block in self.blocks:
            x = block(x, mask)
        return self.error(x, target)


@every_use
def test_writes_into_an_input_without_gradient(run):
    with raises(ModelError, code="unit-input-overwritten", what="blocks.0"):
        run(WithMask)
