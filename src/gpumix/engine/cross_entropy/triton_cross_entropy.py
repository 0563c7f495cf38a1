"""Triton kernel of `engine.cross_entropy.fused_cross_entropy`, the only importer."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def cross_entropy_kernel(
    logits: Any,
    stride: Any,
    targets: Any,
    factors: Any,
    losses: Any,
    classes: Any,
    smoothing: Any,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    target = tl.load(targets + row)
    largest = -3.0e38
    total = 0.0
    plain = 0.0
    hit = 0.0  # the target's logit: summed by the lanes that have it, see below
    for begin in range(0, classes, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < classes, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(value, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(value - higher), 0)
        largest = higher
        plain += tl.sum(tl.where(at < classes, value, 0.0), 0)
        hit += tl.sum(tl.where(at == target, value, 0.0), 0)
    logarithm = largest + tl.log(total)  # of the sum of all exponentials
    own = logarithm - hit
    mean = logarithm - plain / classes
    tl.store(losses + row, own * (1.0 - smoothing) + mean * smoothing)
    if factors is not None:
        # Overwrite the logits. There is no barrier between the loops: each lane stores only where
        # it has loaded itself above, so no warp overwrites a logit that another has yet to load.
        factor = tl.load(factors + row)
        for begin in range(0, classes, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < classes, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(value - logarithm) - smoothing / classes
            gradient = tl.where(at == target, gradient - (1.0 - smoothing), gradient)
            written = (gradient * factor).to(logits.dtype.element_ty)
            tl.store(x + at, written, mask=at < classes)
