"""Where gathered parameters arrive on a rank that computes in another dtype than the others.

All ranks gather parameters in the plan's communication dtype, so that all compute with the same
values. A rank that computes in it gathers straight into its flat buffers and needs none of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gpumix.engine.buckets import Bucket


class Arrivals:
    """Memory for the largest bucket's parameters in the communication dtype; one bucket after the
    other arrives in it, and is cast from there into its own memory.

    Args:
        sizes: bytes of each bucket's flat groups.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], device: torch.device) -> None:
        size = max(map(sum, sizes), default=0)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        # Which holds this: neither is to outlive the engine.
        self._last: weakref.ref[Bucket] | None = None

    def cut(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Memory for the flat groups of one bucket."""
        return [self._memory[end - size : end] for size, end in zip(sizes, accumulate(sizes))]

    def take(self, bucket: Bucket) -> None:
        """Let `bucket` arrive: first wait for the one that may still be arriving. Only where a step
        begins are several under way at once, so nothing is lost by that."""
        last = self._last() if self._last is not None else None
        if last is not None and last is not bucket:
            last.arrived()
        self._last = weakref.ref(bucket)
