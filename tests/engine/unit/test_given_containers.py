"""Lists and dicts that units are given: what they put there gets its gradient, under any plan."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from functools import partial

import pytest
import torch
from torch import nn

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.training.models import ARCHITECTURES, WIDTH, Block, Regression, vectors
from helpers.training.reference import (
    assert_gradients_equal,
    assert_step_is_plain,
    batches,
    engine_alone,
    initialised,
    joined,
    pieces_of,
)

BATCH = 4
LAYERED, SEQUENTIAL = Mode(), Mode(order="sequential", recompute=False)
MODES = [LAYERED, SEQUENTIAL, Mode(order="sequential")]


class Puts(nn.Module):
    """A block that puts a value into a container, and one that it finds there to its output."""

    def __init__(self, put, take=lambda held: 0.0):
        super().__init__()
        self.inner = Block()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.put, self.take = put, take

    def forward(self, x, held):
        y = self.inner(x) + self.take(held)
        self.put(held, self.side(y).tanh())
        return y


class Shares(Regression):
    """A model whose blocks share a container, the values of which count in its loss."""

    def __init__(self, blocks, make, values):
        super().__init__(blocks)
        self.make, self.values = make, values

    def forward(self, x, target):
        x, held = self.enter(x), self.make()
        for block in self.blocks:
            x = block(x, held)
        loss, count = self.error(x, target)
        return loss + sum(v.pow(2).sum() for v in self.values(held)), count


class Shared(UserDict):
    """To pytree it is a leaf."""


def append(held, value):
    held.append(value)


def append_inside(held, value):
    held["lists"][0].append((value, 1))


def put_last(held, value):
    held["last"] = value, value


def last_of(held):
    return held["last"][0] if "last" in held else 0.0


def replace_first(held, value):
    held[0] = value


KINDS = {
    "list": (append, lambda held: held[-1] if held else 0.0, list, lambda held: held),
    "item": (replace_first, lambda held: held[0], lambda: [torch.zeros(WIDTH)], lambda held: held),
    "dict": (put_last, last_of, dict, lambda held: held["last"]),
    "ordered": (put_last, last_of, OrderedDict, lambda held: held["last"]),
    "user dict": (put_last, last_of, Shared, lambda held: held["last"]),
    "inside": (
        append_inside,
        lambda held: held["lists"][0][-1][0] if held["lists"][0] else 0.0,
        lambda: {"lists": ([],)},
        lambda held: [value for value, _ in held["lists"][0]],
    ),
}


def shares(kind):
    put, take, make, values = KINDS[kind]
    return Shares([Puts(put, take) for _ in range(3)], make, values)


@pytest.mark.parametrize("mode", MODES, ids=["layered", "kept", "sequential"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_units_put_into_containers_is_plain(kind, mode):
    factory = partial(shares, kind)
    engine = engine_alone(factory, BATCH, 2, mode=mode, zero_stage=0)
    assert_step_is_plain(engine, factory, vectors(BATCH, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("mode", MODES, ids=["layered", "kept", "sequential"])
def test_a_cache_that_a_model_asks_for_is_filled_once(mode):
    llama, lengths = ARCHITECTURES["llama"], []

    def loss(model, batch):
        found = model(**batch, use_cache=True)
        lengths.append(found.past_key_values.get_seq_length(1))
        keys = found.past_key_values.layers[0].keys
        return found.loss + keys.square().mean(), torch.tensor(1)

    batch = next(batches(llama, 2, 1))
    model = initialised(llama.factory)
    loss(model, batch)[0].backward()
    engine = engine_alone(llama.factory, 2, 2, loss=loss, mode=mode, zero_stage=0)
    engine.step(batch)
    expected = {n: p.grad.numpy() for n, p in model.named_parameters()}
    assert_gradients_equal(joined([pieces_of(engine, gradients=True)]), expected)
    assert {*lengths} == {batch["input_ids"].shape[1]}


def one_step(put, make, mode=LAYERED, **settings):
    engine = engine_alone(
        lambda: Shares([Puts(put) for _ in range(2)], make, lambda held: []),
        BATCH, 2, mode=mode, zero_stage=0, **settings,
    )  # fmt: skip
    return engine.step(vectors(BATCH, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("mode", MODES, ids=["layered", "kept", "sequential"])
@pytest.mark.parametrize(
    ("put", "make", "named"),
    [
        (lambda held, value: held.clear(), lambda: [torch.zeros(2)], "list"),
        (lambda held, value: held.pop("a"), lambda: {"a": torch.zeros(2)}, "dict"),
        (append, deque, "deque"),
        (lambda held, value: held[0].append(value), lambda: [[]] * 2, "twice"),
    ],
)
def test_other_changes_are_refused(put, make, named, mode):
    with raises(ModelError, code="unit-changes-container", what=("blocks.0", named)):
        one_step(put, make, mode)
