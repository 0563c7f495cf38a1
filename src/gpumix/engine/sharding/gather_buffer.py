"""Receive buffers of all-gathers on ranks with a compute dtype unlike the communication dtype.

All ranks all-gather in the plan's communication dtype, so that all compute with equal values. A
rank that computes in this dtype gathers straight into its flat buffers and needs no receive buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch


class ArrivingBucket(Protocol):
    """Bucket whose parameters may be in flight."""

    def arrived(self) -> None:
        """Wait for the parameters, and cast them into the bucket's own memory."""


class GatherBuffer:
    """Memory for the largest bucket's parameters in the communication dtype. Buckets arrive here
    one after another, and each is cast into its own memory.

    Args:
        sizes: bytes of each bucket's flat groups.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], device: torch.device) -> None:
        size = max(map(sum, sizes), default=0)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        # Weak, because the bucket references this object and neither may outlive the engine.
        self._last: weakref.ref[ArrivingBucket] | None = None

    def cut(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return views of the memory for the flat groups of a bucket."""
        return [self._memory[end - size : end] for size, end in zip(sizes, accumulate(sizes))]

    def take(self, bucket: ArrivingBucket) -> None:
        """Claim the memory for `bucket`, after waiting for the previous bucket. Several gathers are
        in flight only at the start of a step, so the wait costs nothing."""
        last = self._last() if self._last is not None else None
        if last is not None and last is not bucket:
            last.arrived()
        self._last = weakref.ref(bucket)
