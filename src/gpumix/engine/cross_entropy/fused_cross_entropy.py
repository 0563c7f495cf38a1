"""Fused cross-entropy: losses of rows of logits, and their gradient in place, as a Triton kernel.

The plain version (`engine.cross_entropy.linear_cross_entropy`) reads and writes a chunk's logits
about eight times and keeps an fp32 copy. This kernel reads them once in forward and, if gradients
are wanted, once more, and writes them once. A program handles one row. Triton is imported on first
use and may be absent.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gpumix.schema.errors import MachineError

MAX_BLOCK_COLUMNS = 4096  # columns per iteration, in registers


def compute_fused_losses(
    logits: Tensor, targets: Tensor, factors: Tensor | None, label_smoothing: float
) -> Tensor:
    """Compute the cross-entropy of each row, in fp32.

    Args:
        logits: (rows, classes), of any floating dtype, contiguous; with `factors` replaced by the
            gradient of each row's loss times its factor.
        targets: (rows,), a class for each row.
        factors: (rows,), fp32; None: no gradient is wanted.

    Raises:
        MachineError: Triton is missing.
    """
    rows, classes = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        triton, kernel = _import_kernel()
        block = min(MAX_BLOCK_COLUMNS, triton.next_power_of_2(classes))
        kernel[(rows,)](
            logits,
            logits.stride(0),
            targets,
            factors,
            losses,
            classes,
            label_smoothing,
            BLOCK=block,
            num_warps=max(4, min(16, block // 256)),
        )
    return losses


@functools.cache
def _import_kernel() -> tuple[Any, Any]:
    try:
        import triton
    except ImportError as error:
        raise MachineError(
            "the fused loss needs Triton, which is not installed",
            code="triton-missing",
            fix="pip install triton, or `advanced.efficiency.loss: torch`",
        ) from error
    from gpumix.engine.cross_entropy.triton_cross_entropy import cross_entropy_kernel

    return triton, cross_entropy_kernel
