"""Loops of Python over operations, and what only looks like them; of this file, by the line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpumix.doctor.function.observations import OperationCounts
from gpumix.doctor.function.watching.loops import OperationCounter
from gpumix.doctor.function.watching.operations import OperationInspector

LENGTH, WIDTH = 24, 4


def line_of(text: str) -> str:
    """The place of the one line of this file that holds `text`."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return f"test_function_loops.py:{number}"


def counted(step: Callable[[], Tensor]) -> OperationCounts:
    counter = OperationCounter()
    look = OperationInspector(counter)
    look.begin()
    try:
        step().sum().backward()
    finally:
        counter.next_step()
        look.end()
    assert counter.last is not None
    return counter.last


X = torch.ones(2, LENGTH, WIDTH)


def by_cells() -> Tensor:
    """Its first round makes the state, in a line of torch."""
    cell, state = nn.LSTMCell(WIDTH, WIDTH), None
    for t in range(LENGTH):
        state = cell(X[:, t], state)  # by cells
    return state[0]


def by_an_own_cell() -> Tensor:
    first, again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def cell(x: Tensor, state: Tensor) -> Tensor:
        gate = first(x).sigmoid()
        return gate * again(state).tanh()

    state = torch.zeros(2, WIDTH)
    for x in X.unbind(1):
        state = cell(x, state)  # by an own cell
    return state


def by_a_comprehension() -> Tensor:
    layer = nn.Linear(WIDTH, WIDTH)
    return torch.stack([layer(row) for row in X[0]])  # by a comprehension


def by_sums() -> Tensor:
    """Without any parameter."""
    total = torch.zeros(WIDTH, requires_grad=True)
    for x in X[0]:
        total = total + x  # by sums
    return total


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (by_cells, "# by " + "cells"),
        (by_an_own_cell, "# by " + "an own cell"),
        (by_a_comprehension, "# by " + "a comprehension"),
        (by_sums, "# by " + "sums"),
    ],
)
def test_a_loop_of_python(step, line):
    seen = counted(step)
    (loop,) = seen.lines
    assert loop.place.endswith(line_of(line)) and loop.repeats == LENGTH
    assert seen.forward > loop.operations >= LENGTH and seen.total > seen.forward
    assert loop.operations > seen.forward / 2


def one_operation() -> Tensor:
    """C++ has a loop of its own; a layer for a GPU has a kernel."""
    return nn.GRU(WIDTH, WIDTH, batch_first=True)(X)[0]


def layers() -> Tensor:
    """A loop, of which each round has its own parameters."""
    x = X
    for layer in [nn.Linear(WIDTH, WIDTH) for _ in range(LENGTH)]:
        x = layer(x).relu()
    return x


def layers_of_a_library() -> Tensor:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LENGTH)])(X)


def micro_batches() -> Tensor:
    """Each has its backward pass."""
    layer = nn.Linear(WIDTH, WIDTH)
    for _ in range(LENGTH):
        layer(X).sum().backward()
    return layer(X)


def few_rounds() -> Tensor:
    layer = nn.Linear(WIDTH, WIDTH)
    return sum(layer(x) for x in X)


def products() -> Tensor:
    return torch.einsum("bld,bmd,d->blm", X, X, torch.ones(WIDTH, requires_grad=True))


@pytest.mark.parametrize(
    "step", [one_operation, layers, layers_of_a_library, micro_batches, few_rounds, products]
)
def test_what_is_none(step):
    seen = counted(step)
    assert seen.lines == () and 0 < seen.forward < seen.total


def test_each_step_is_counted_by_itself():
    counter = OperationCounter()
    look = OperationInspector(counter)
    look.begin()
    found = []
    for operations in (3, 2):
        for _ in range(operations):
            X + X
        counter.next_step()
        found.append(counter.last)
    look.end()
    X + X
    assert [one.total for one in found] == [3, 2]
    counter.next_step()  # of which nothing was seen
    assert counter.last == found[1]
