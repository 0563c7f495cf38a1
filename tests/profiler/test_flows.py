"""From what a model's unit calls and its loss are computed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from helpers.extended import left_out
from helpers.training.models import ARCHITECTURES, Architecture, Block, Regression, vectors
from helpers.training.staging import EVERY, flows_of

EXPECTED = {
    # The token embedding is the head too.
    "gpt2": (
        {"transformer.wpe.weight"},
        {"transformer.ln_f.weight", "transformer.ln_f.bias"},
    ),
    "llama": ({"model.embed_tokens.weight"}, {"model.norm.weight", "lm_head.weight"}),
    # Its embeddings are a unit.
    "bert": (set(), None),
    # One table for encoder, decoder and head; the encoder's norm lies between units.
    "t5": (set(), {"decoder.final_layer_norm.weight"}),
    "plain-own-blocks": (set(), None),
}


ENDS = [*((name, False) for name in EXPECTED), ("llama", True)]


@pytest.mark.parametrize(
    ("name", "in_chunks"), left_out(ENDS, [("llama", False), ("bert", False), ("t5", False)])
)
def test_ends_are_found(name, in_chunks):
    flows = flows_of(name, in_chunks=in_chunks)
    model = ARCHITECTURES[name].factory()
    numels = {name: p.numel() for name, p in model.named_parameters()}
    for end, expected in zip((flows.before, flows.after), EXPECTED[name]):
        if expected is not None:
            assert set(end.names) == expected
        assert end.trainable == sum(numels[name] for name in end.names)


NORM = {"transformer.ln_f.weight", "transformer.ln_f.bias"}
ENCODED = {"encoder.final_layer_norm.weight"}
# Of each call, then of the loss: parameters of the root, and (call, place) of what is taken.
NEEDS = {
    "gpt2": [
        ({"transformer.wte.weight", "transformer.wpe.weight"}, []),
        (set(), [(0, 0)]),
        (set(), [(1, 0)]),
        ({"transformer.wte.weight", *NORM}, [(2, 0)]),
    ],
    # Layers share the bias of positions, which the first of them makes; the decoder's need what
    # the encoder has come to, after its norm.
    "t5": [
        ({"shared.weight"}, []),
        (set(), [(0, 0), (0, 1)]),
        ({"shared.weight", *ENCODED}, [(1, 0)]),
        (ENCODED, [(1, 0), (2, 0), (2, 1), (2, 2)]),
        ({"shared.weight", "decoder.final_layer_norm.weight"}, [(3, 0)]),
    ],
    # Its embeddings, a unit, use the table that the head does.
    "bert": [
        ({"bert.embeddings.word_embeddings.weight"}, []),
        (set(), [(0, 0)]),
        (set(), [(1, 0)]),
        (set(), [(2, 0)]),
        (None, [(3, 0)]),
    ],
    # What is taken of a block that returns more than others of its structure.
    "by_number": [
        (None, []),
        (set(), [(0, 0)]),
        (set(), [(1, 1)]),
        (set(), [(2, 0)]),
        (None, [(1, 0), (3, 0)]),
    ],
    # What blocks look at is their own affair.
    "looks_inside": [
        (None, []),
        (set(), [(0, 0)]),
        (set(), [(1, 0)]),
        (None, [(2, 0)]),
    ],
    # Its code looks at the first block's output before it calls the third one.
    "looks_back": [
        (None, []),
        (set(), [(0, 0)]),
        (set(), [(0, 0), (1, 0)]),
        (None, [(0, 0), (2, 0)]),
    ],
}


@pytest.mark.parametrize("name", NEEDS)
def test_calls_need_no_more_than_they_are_computed_from(name):
    found = flows_of(name).needs
    assert len(found) == len(NEEDS[name])
    for needs, (root, outputs) in zip(found, NEEDS[name]):
        assert root is None or set(needs.root) == root
        assert [(taken.call, taken.output) for taken in needs.outputs] == outputs


@pytest.mark.parametrize(
    ("name", "without"), [("rounds", {0, 1}), ("never_rounds", set()), ("u_shape", set())]
)
def test_what_gets_no_gradient_is_told(name, without):
    taken = [one for need in flows_of(name).needs for one in need.outputs]
    assert {one.call for one in taken if not one.differentiable} == without
    assert {one.call for one in taken if one.differentiable}.isdisjoint(without)


class Unwatched(Regression):
    """Its code does not run where functions are watched."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(2)])

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if torch._C._len_torch_function_stack():
            raise RuntimeError("somebody watches")
        return super().forward(x, target)


class Forgetful(Regression):
    """Nothing uses what its second block returns."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(3)])

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = self.blocks
        x = first(self.enter(x))
        second(x)
        return self.error(third(x), target)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("forgetful", "call 1, of unit 'blocks.1': nothing uses what it returns"),
        ("goes_by_numbers", "'blocks.0' returns cannot be told .* a number is among"),
        ("unwatched", "it fails: somebody watches"),
    ],
)
def test_a_model_of_which_nothing_is_found_has_no_stages(name, told, monkeypatch):
    for one in (Unwatched, Forgetful):
        own = one.__name__.lower()
        monkeypatch.setitem(EVERY, own, Architecture(own, one, vectors))
    found = flows_of(name)
    assert found.needs == ()
    assert re.search(told, found.no_stages)
