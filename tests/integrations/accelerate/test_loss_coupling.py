"""Losses of loops that couple samples, and such that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpumix.integrations.accelerate import loss_coupling
from gpumix.integrations.accelerate.loss_coupling import check_row_coupling
from gpumix.schema.errors import InputError
from helpers.errors import raises

Y = torch.tensor([0, 2, 1, 2])
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda z: F.cross_entropy(z, Y),
    "smoothed": lambda z: F.cross_entropy(z, Y, label_smoothing=0.1),
    "a class left out": lambda z: F.cross_entropy(z, Y, ignore_index=2),
    "squares": lambda z: F.mse_loss(z, torch.ones_like(z)),
    "a focal loss": lambda z: ((1 - z.sigmoid()) ** 2 * z.sigmoid().log()).sum() / 3,
    "linear": lambda z: z.mean(),
    "likeness to something fixed": lambda z: F.cosine_similarity(z, torch.ones_like(z)).mean(),
    "a mean of each sample's norm": lambda z: z.norm(dim=1).mean(),
    "weights": lambda z: (z.square().sum(1) * Y).sum() / Y.sum(),
    "no second derivative": lambda z: F.ctc_loss(
        z[:, None].expand(4, 4, 3).log_softmax(-1).transpose(0, 1),
        torch.ones(4, 2, dtype=torch.int64), torch.full((4,), 4), torch.full((4,), 2),
    ),
}  # fmt: skip
COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "negatives in the batch": lambda z: (z @ z.T).logsumexp(1).mean(),
    "a deviation": lambda z: F.cross_entropy(z, Y) + 1e-3 * z.std(),
    "a balancing term": lambda z: F.cross_entropy(z, Y) + z.softmax(1).mean(0).square().sum(),
    "a softmax over samples": lambda z: -z.log_softmax(0)[0].sum(),
    "a root of a mean": lambda z: z.square().mean().sqrt(),
    "the hardest samples": lambda z: (z[:, None] - z).square().sum(2).amax(1).sqrt().mean(),
}  # fmt: skip


def outputs() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("name", APART)
def test_a_sum_over_samples_is_none(name):
    z = outputs()
    loss = APART[name](z)
    check_row_coupling(loss, [z])
    loss.backward()  # its graph is still there
    assert z.grad is not None


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_samples_is_refused(name):
    z = outputs()
    with raises(InputError, code="loss-couples-samples"):
        check_row_coupling(COUPLED[name](z), [z])


def test_of_several_outputs_those_with_rows_are_looked_at():
    z, w, scalar = outputs(), outputs(), torch.ones((), requires_grad=True)
    check_row_coupling(scalar * F.cross_entropy(z, Y) + w.square().mean(), [scalar, z, w])
    with pytest.raises(InputError):
        check_row_coupling((z @ w.T).logsumexp(1).mean() * scalar, [scalar, z, w])


def test_a_single_row_and_outputs_that_are_too_large_are_not_looked_at(monkeypatch):
    z = outputs()
    check_row_coupling((z[:1] @ z[:1].T).exp().sum(), [z[:1].detach().requires_grad_()])
    monkeypatch.setattr(loss_coupling, "MAX_ELEMENTS", 11)
    check_row_coupling(COUPLED["negatives in the batch"](z), [z])


def test_random_numbers_are_as_they_would_be():
    z = outputs()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    check_row_coupling(F.cross_entropy(z, Y), [z])
    assert torch.equal(torch.rand(2), expected)
