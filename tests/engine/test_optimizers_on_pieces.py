"""Optimizers of unknown kind: whether they update pieces as they update the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpumix.engine.optimizers.elementwise_check import check_on_pieces
from gpumix.schema.errors import InputError


class Own(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float = 0.1, **more) -> None:
        super().__init__(parameters, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)


class Signs(Own):
    """Keeps a state, as most do."""

    def update(self, p, group):
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        mean.lerp_(p.grad, 0.1)
        p.add_(mean.sign(), alpha=-group["lr"])


class ByNorms(Own):
    def update(self, p, group):
        p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class Noisy(Own):
    def update(self, p, group):
        p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


class OfMatrices(Own):
    """Decays matrices alone."""

    def update(self, p, group):
        p.mul_(0.9 if p.dim() > 1 else 1.0).add_(p.grad, alpha=-group["lr"])


class Around(Own):
    """Its own step is that of another one, which holds the real parameters."""

    def __init__(self, parameters) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = ByNorms(parameters)

    def step(self, closure=None):
        self.inner.step()


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2))]


@pytest.mark.parametrize("kind", [ByNorms, Noisy, OfMatrices])
def test_one_that_looks_at_more_than_an_element_is_refused(kind):
    with pytest.raises(InputError, match=f"{kind.__name__} cannot update") as caught:
        check_on_pieces(kind(weights()))
    assert "updates their pieces otherwise than the whole" in caught.value.why


@pytest.mark.parametrize("kind", [Signs, torch.optim.AdamW, torch.optim.NAdam])
def test_one_that_goes_by_elements_passes(kind):
    before = torch.get_rng_state()
    optimizer = kind(weights(), lr=0.1)
    check_on_pieces(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3, 2))


def test_real_parameters_are_left_alone():
    optimizer = Around(weights())
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    check_on_pieces(optimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3, 2))
