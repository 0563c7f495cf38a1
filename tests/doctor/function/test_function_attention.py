"""Attention that code writes out, and what only looks like it; of this file, by the line."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpumix.doctor.function.watching.attention import UnfusedAttentionFinder
from gpumix.doctor.function.watching.operations import OperationInspector

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 4


def line_of(text: str) -> str:
    """The place of the one line of this file that holds `text`."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return f"test_function_attention.py:{number}"


def by_matmul(x: Tensor) -> Tensor:
    scores = x @ x.transpose(-1, -2) / WIDTH**0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = torch.where(hidden, float("-inf"), scores.double()).masked_fill_(hidden, -1e9)
    weights = scores.softmax(-1).to(x)  # by matmul
    return F.dropout(weights, 0.1) @ x


def by_einsum(x: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", x, x)
    weights = F.softmax(scores, dim=-1)  # by einsum
    return torch.einsum("bhqk,bhkd->bhqd", weights, x)


def by_torchs_module(x: Tensor) -> Tensor:
    attend = nn.MultiheadAttention(WIDTH, 2)
    return attend(x[0], x[0], x[0])[0]  # by torch


def by_a_kernel(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def by_no_kernel(x: Tensor) -> Tensor:
    """CPUs have none with dropout: then torch writes it out itself, and nobody can do better."""
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


def a_router(x: Tensor) -> Tensor:
    """Weighs experts, for each token alone."""
    weights = nn.Linear(WIDTH, 2)(x).softmax(-1)
    return torch.einsum("bhle,bhld->bhed", weights, x)


def classes(x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2)).softmax(-1).sum()


def looked_at(compute) -> list[str]:
    found = UnfusedAttentionFinder()
    look = OperationInspector(found)
    look.begin()
    try:
        compute(torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True)).sum().backward()
    finally:
        look.end()
    return found.places


@pytest.mark.parametrize(
    ("compute", "line"),
    [
        (by_matmul, "# by " + "matmul"),
        (by_einsum, "# by " + "einsum"),
        (by_torchs_module, "# by " + "torch"),
    ],
)
def test_a_softmax_between_two_products(compute, line):
    (place,) = looked_at(compute)
    assert place.endswith(line_of(line))


@pytest.mark.parametrize("compute", [by_a_kernel, by_no_kernel, a_router, classes])
def test_what_is_none(compute):
    assert looked_at(compute) == []


def test_that_of_a_library_is_the_librarys():
    """Whoever asked for it there is told of its setting."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=16, attn_implementation="eager")
    model = GPT2LMHeadModel(config)

    def logits(x: Tensor) -> Tensor:
        return model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits

    assert looked_at(logits) == []


def test_all_is_as_before_in_the_end():
    before = F.scaled_dot_product_attention
    found = UnfusedAttentionFinder()
    look = OperationInspector(found)
    look.begin()
    assert F.scaled_dot_product_attention is not before
    look.end()
    look.end()
    assert F.scaled_dot_product_attention is before
    by_matmul(torch.ones(BATCH, HEADS, LENGTH, WIDTH))
    assert found.places == []


@pytest.mark.extended
def test_what_is_compiled_stays_so():
    """Its steps are measured next. Code of a graph has no lines: those are the function's."""
    made = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        made.append(graph)
        return graph

    (place,) = looked_at(torch.compile(by_matmul, backend=backend))
    assert place.endswith(line_of("def by_" + "matmul"))
    assert len(made) == 1
