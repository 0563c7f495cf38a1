"""The fused kernel of the loss beside PyTorch, in Triton's interpreter: a process of its own, for
Triton looks whether to interpret when it is imported. Prints as JSON the largest errors, and how
many elements of logits several lanes of a program touch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from triton.runtime.interpreter import interpreter_builder

from gpumix.engine.cross_entropy import linear_cross_entropy
from gpumix.engine.cross_entropy.fused_cross_entropy import MAX_BLOCK_COLUMNS, compute_fused_losses
from gpumix.engine.cross_entropy.linear_cross_entropy import (
    Gradients,
    GradientSum,
    LinearCrossEntropy,
)

ROWS, WIDTH = 13, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
linear_cross_entropy.compute_chunk_rows = lambda rows, **sizes: 5


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def of_kernel(dtype: torch.dtype, rows: int, classes: int, smoothing: float) -> float:
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    targets, factors = torch.randint(classes, (rows,)), torch.randn(rows)
    leaf = logits.double().requires_grad_()
    right = F.cross_entropy(leaf, targets, reduction="none", label_smoothing=smoothing)
    (right * factors).sum().backward()
    assert leaf.grad is not None
    forward_only = compute_fused_losses(logits, targets, None, smoothing)
    losses = compute_fused_losses(logits, targets, factors, smoothing)
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
        into = Gradients(
            torch.empty_like(problem.hidden),
            GradientSum(torch.zeros(31, WIDTH)),
            GradientSum(torch.zeros(31)),
        )
        way = replace(problem, fused=fused)
        assert into.weight is not None and into.bias is not None
        loss = way.run(torch.tensor(0.5), into)
        found.append([loss, into.hidden, into.weight.tensor, into.bias.tensor])
        found[-1].append(way.value())
    return max(error(a, b) for a, b in zip(*found))


@contextmanager
def lanes_by_address() -> Iterator[dict[int, set[int]]]:
    """Which lanes of a program load or store each address; -1: all of them, by a scalar pointer."""
    seen: dict[int, set[int]] = defaultdict(set)
    calls = ("create_load", "create_store", "create_masked_load", "create_masked_store")
    originals = {name: getattr(interpreter_builder, name) for name in calls}

    def watched(original: Any) -> Any:
        def call(pointers: Any, *rest: Any) -> Any:
            addresses = np.ravel(pointers.data)
            lanes = range(len(addresses)) if len(addresses) > 1 else (-1,)
            for lane, address in zip(lanes, addresses):
                seen[int(address)].add(lane)
            return original(pointers, *rest)

        return call

    for name, original in originals.items():
        setattr(interpreter_builder, name, watched(original))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(interpreter_builder, name, original)


def shared_elements(classes: int) -> int:
    """How many elements of logits more than one lane of a program loads or stores. There is no
    barrier between the kernel's loops: one lane could store such an element before another lane
    loads it.

    Args:
        classes: a multiple of the block, so that no lane is masked.
    """
    logits, factors = torch.randn(3, classes), torch.randn(3)
    begin, end = logits.data_ptr(), logits.data_ptr() + logits.nbytes
    with lanes_by_address() as seen:
        compute_fused_losses(logits, torch.randint(classes, (3,)), factors, 0.1)
    own = {address: lanes for address, lanes in seen.items() if begin <= address < end}
    assert len(own) == logits.numel(), "each element is loaded"
    return sum(lanes == {-1} or len(lanes) > 1 for lanes in own.values())


if __name__ == "__main__":
    torch.manual_seed(0)
    worst = {
        f"kernel {name}": max(of_kernel(d, *sizes) for sizes in ((3, 7, 0.0), (3, 5000, 0.1)))
        for name, d in DTYPES.items()
    }
    worst |= {
        f"loss {name}": max(of_problem(dtype, mean) for mean in (True, False))
        for name, dtype in DTYPES.items()
    }
    print(json.dumps({"errors": worst, "shared": shared_elements(2 * MAX_BLOCK_COLUMNS)}))
