"""The tensors that a unit saves for its backward are computed anew, once, and no further."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gpumix.engine.model.backward_hooks import CheckpointedRun
from gpumix.engine.model.forward_coroutine import ModelError
from helpers.errors import raises


class Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def differentiated(run):
    """Forward and backward of the sum, with recompute."""
    recomputed = CheckpointedRun("blocks.3", run)
    out = recomputed.forward(run)
    recomputed.backward([get_gradient_edge(out.sum())], [torch.ones(())])
    return out


class Hoarder(torch.autograd.Function):
    """Asks for what it saved as often as it needs it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * 2)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        first, second = ctx.saved_tensors[0], ctx.saved_tensors[1]
        return gradient * (first + second / 2)


def test_gradients_are_those_of_an_ordinary_backward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    x = torch.randn(5, 4, requires_grad=True)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in (x, *model.parameters())]
    for p in (x, *model.parameters()):
        p.grad = None
    differentiated(lambda: model(x).square())
    for p, gradient in zip((x, *model.parameters()), expected):
        assert torch.equal(p.grad, gradient)


def test_what_follows_the_last_saved_tensor_is_computed_once():
    first, last = Counted(4, 4), Counted(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    differentiated(lambda: last(torch.tanh(first(x))) + 1)
    assert first.calls == 2
    assert last.calls == 2  # it is reached: what it saves is its input

    def run():
        saved.append(torch.exp(x))
        tail.append(1)
        return saved[-1] + 1

    saved, tail = [], []
    differentiated(run)
    assert len(tail) == 1


def test_nothing_saved_lives_between_forward_and_backward():
    x = torch.randn(3, requires_grad=True)
    alive = []

    def run():
        y = torch.exp(x)
        alive.append(weakref.ref(y.untyped_storage()))
        return y * x.detach()

    recomputed = CheckpointedRun("blocks.3", run)
    out = recomputed.forward(run)
    assert alive[0]() is None
    recomputed.backward([get_gradient_edge(out.sum())], [torch.ones(())])
    assert torch.allclose(x.grad, x.detach().exp() * x.detach())
    assert alive[1]() is None


def test_a_result_that_is_kept_holds_nothing_of_its_rerun():
    x = torch.randn(3, requires_grad=True)
    kept, alive = [], []

    def run():
        y = torch.exp(x)
        alive.append(weakref.ref(y.untyped_storage()))
        kept.append(y * y)
        return kept[-1] * 2

    differentiated(run)
    assert len(alive) == 2
    assert all(storage() is None for storage in alive)


def test_functions_may_ask_more_than_once():
    x = torch.tensor([3.0], requires_grad=True)
    runs = []

    def run():
        runs.append(1)
        return sum(Hoarder.apply(x) for _ in range(20))

    differentiated(run)
    assert x.grad.item() == pytest.approx(120.0)
    assert len(runs) <= 3


def test_a_unit_may_differentiate_inside():
    """Forces from an energy, as models of molecules compute them."""
    x = torch.tensor([2.0], requires_grad=True)

    def run():
        [slope] = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return slope * x

    differentiated(run)
    assert x.grad.item() == pytest.approx(9 * 2.0**2)


def test_a_tensor_that_changes_after_it_was_saved_is_refused():
    """Plain PyTorch refuses it too."""
    x = torch.ones(3, requires_grad=True)

    def run():
        y = torch.exp(x)
        z = y * 2
        y.add_(1.0)
        return torch.tanh(z + y)

    with raises(ModelError, code="unit-tensor-overwritten"):
        differentiated(run)


def test_nothing_is_there_outside_of_its_backward():
    x = torch.ones(3, requires_grad=True)
    out = CheckpointedRun("blocks.3", lambda: torch.exp(x)).forward(lambda: torch.exp(x))
    with raises(ModelError, code="unit-tensor-leaked", what="blocks.3"):
        out.sum().backward()


@torch.jit.script
def scripted(x):
    return torch.tanh(x * x)


def test_torchscript_may_be_inside():
    x = torch.tensor([0.5], requires_grad=True)
    differentiated(lambda: scripted(x * 1.5))
    expected = torch.tensor([0.5], requires_grad=True)
    scripted(expected * 1.5).backward()
    assert torch.allclose(x.grad, expected.grad)


@pytest.mark.parametrize(("widths", "now"), [((4, 5), "[5] of torch.float32"), ((4, 0), "nothing")])
def test_another_computation_is_refused(widths, now):
    x = torch.ones(8, requires_grad=True)
    width = iter(widths)

    def run():
        n = next(width)
        return torch.exp(x[:n]).sum() if n else x.sum()

    with raises(ModelError, code="recompute-differs", what="blocks.3") as error:
        differentiated(run)
    assert "[4] of torch.float32" in error.value.why
    assert now in error.value.why
