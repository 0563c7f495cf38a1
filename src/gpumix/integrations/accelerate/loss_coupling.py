"""Test of a loop's own loss for coupling between rows of the model's outputs.

In a loss that is a sum over samples, the gradient by a row depends on no other row. Second
derivatives of the existing graph show this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpumix.schema.errors import InputError

MAX_ELEMENTS = 2**22  # of outputs: second derivatives take several times their memory
TOLERANCE = 1e-6  # relative: for a sum over samples the coupling is exactly 0


def check_row_coupling(loss: Tensor, outputs: Sequence[Tensor]) -> None:
    """Check that a loss couples no rows of the outputs.

    Args:
        loss: with its graph, which is kept.
        outputs: leaves of the graph.

    Raises:
        InputError: the loss couples rows of the outputs.
    """
    if _has_coupled_rows(loss, outputs):
        raise InputError(
            "the loss of the loop couples samples of a batch",
            code="loss-couples-samples",
            where="accelerator.backward",
            why="the gradient by one sample's outputs depends on other samples (negatives in the "
            "batch, statistics of a batch), and each rank has a part of the batch",
            fix="gather the outputs of all ranks first, or let a single device compute; "
            "Accelerator(couples='micro-batch') accepts that each rank has a loss of its own, and "
            "couples='batch' has one rank compute each batch",
        )


def _has_coupled_rows(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    rows = max((len(one) for one in outputs if one.dim()), default=0)
    outputs = [one for one in outputs if one.dim() and len(one) == rows]
    if rows < 2 or sum(one.numel() for one in outputs) > MAX_ELEMENTS:
        return False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noise = [torch.randn(one.shape).to(one) for one in outputs]
    try:
        found = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
        of_first, of_others = loss.new_zeros(()), loss.new_zeros(())
        for gradient, own in zip(found, noise):
            if gradient is not None and gradient.requires_grad:
                of_first = of_first + (gradient[0] * own[0]).sum()
                of_others = of_others + (gradient[1:] * own[1:]).sum()
        if not of_first.requires_grad:
            return False  # linear in its outputs
        by_first = _compute_first_row_norm(of_first, outputs)
        by_others = _compute_first_row_norm(of_others, outputs)
    except RuntimeError:  # an operation has no second derivative
        return False
    return bool(by_others > TOLERANCE * (by_first + by_others))


def _compute_first_row_norm(value: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Return the norm of the derivative by the first row."""
    found = torch.autograd.grad(value, outputs, retain_graph=True, allow_unused=True)
    squares = [one[0].double().square().sum() for one in found if one is not None]
    return torch.stack(squares).sum().sqrt() if squares else value.new_zeros((), dtype=torch.double)
