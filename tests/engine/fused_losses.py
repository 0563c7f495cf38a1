"""The fused kernel of the loss beside PyTorch, in Triton's interpreter: a process of its own, for
Triton looks whether to interpret when it is imported. Prints the largest errors as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch.nn import functional as F

from gpumix.engine import chunked_loss
from gpumix.engine.chunked_loss import Gradients, LinearCrossEntropy
from gpumix.engine.fused_loss import fused_losses

ROWS, WIDTH = 13, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
chunked_loss.rows_per_chunk = lambda rows, **sizes: 5


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def of_kernel(dtype: torch.dtype, classes: int, smoothing: float) -> float:
    logits = (3 * torch.randn(ROWS, classes)).to(dtype)
    targets, factors = torch.randint(classes, (ROWS,)), torch.randn(ROWS)
    leaf = logits.double().requires_grad_()
    right = F.cross_entropy(leaf, targets, reduction="none", label_smoothing=smoothing)
    (right * factors).sum().backward()
    assert leaf.grad is not None
    forward_only = fused_losses(logits, targets, None, smoothing)
    losses = fused_losses(logits, targets, factors, smoothing)
    return max(error(forward_only, right), error(losses, right), error(logits, leaf.grad))


def of_problem(dtype: torch.dtype, mean: bool) -> float:
    """The whole loss of a linear layer in chunks, with rows that do not count, and its bias."""
    targets = torch.randint(31, (ROWS,))
    targets[::4] = -100
    problem = LinearCrossEntropy(
        torch.randn(ROWS, WIDTH).to(dtype), torch.randn(31, WIDTH).to(dtype),
        torch.randn(31).to(dtype), targets, (), torch.float32, -100, 0.1, mean,
    )  # fmt: skip
    found = []
    for fused in (True, False):
        into = Gradients(torch.empty_like(problem.hidden), torch.zeros(31, WIDTH), torch.zeros(31))
        way = replace(problem, fused=fused)
        found.append([way.run(torch.tensor(0.5), into), into.hidden, into.weight, into.bias])
        found[-1].append(way.value())
    return max(error(a, b) for a, b in zip(*found))


if __name__ == "__main__":
    torch.manual_seed(0)
    worst = {
        f"kernel {name}": max(of_kernel(d, n, s) for n in (7, 5000) for s in (0.0, 0.1))
        for name, d in DTYPES.items()
    }
    worst |= {
        f"loss {name}": max(of_problem(dtype, mean) for mean in (True, False))
        for name, dtype in DTYPES.items()
    }
    print(json.dumps(worst))
