"""Losses of rows of logits, and their gradient in place, as one Triton kernel.

The plain way (`engine.chunked_loss`) reads and writes a chunk's logits about eight times and keeps
an fp32 copy of them; this reads them twice in a forward pass and once more, and writes them once,
where gradients are wanted. A program does one row. Triton is imported where the kernel is made: it
need not be there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gpumix.spec.errors import MachineError

LARGEST_BLOCK = 4096  # columns at a time, in registers


def fused_losses(
    logits: Tensor, targets: Tensor, factors: Tensor | None, label_smoothing: float
) -> Tensor:
    """Cross entropy of each row, in fp32.

    Args:
        logits: (rows, classes), of any floating dtype, contiguous; with `factors` they become the
            gradient of each row's loss times its factor.
        targets: a class each.
        factors: (rows,), fp32; None: no gradient is wanted.

    Raises:
        MachineError: there is no Triton.
    """
    rows, classes = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        triton, kernel = _kernel()
        block = min(LARGEST_BLOCK, triton.next_power_of_2(classes))
        kernel[(rows,)](
            logits,
            logits.stride(0),
            targets,
            losses if factors is None else factors,
            losses,
            classes,
            label_smoothing,
            GRADIENT=factors is not None,
            BLOCK=block,
            num_warps=max(4, min(16, block // 256)),
        )
    return losses


@functools.cache
def _kernel() -> tuple[Any, Any]:
    try:
        import triton
    except ImportError as error:
        raise MachineError(
            "Triton is not here, which the fused loss is written in",
            fix="pip install triton, or `efficiency: {loss: torch}`",
        ) from error
    from gpumix.engine.fused_loss_kernel import row_losses

    return triton, row_losses
