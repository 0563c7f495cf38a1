"""Forms of the optimizer's state, and their sizes. Pure.

In 8 bits, blocks of a parameter's elements are quantised together, each with a maximum in fp32;
small parameters keep state in fp32. Sizes are those of bitsandbytes.
"""

from __future__ import annotations

from typing import Literal

OptimizerState = Literal["fp32", "8bit"]

QUANTISED_BLOCK = 256
"""Elements that are quantised together."""
LEAST_QUANTISED = 4096
"""Elements of the smallest parameter whose state is quantised."""
ADAMW_BYTES = 8
"""Bytes of AdamW's state per element: two moments in fp32."""
ADAMW_8BIT_SLOWDOWN = 10.0
"""Time of an update in 8 bits over that of torch's fused AdamW, assumed before it is measured."""
EIGHT_BIT_OPTIMIZER = "8bit-optimizer"
"""What a job may allow."""
ADAMW_8BIT_BYTES = 2 + 2 * 4 / QUANTISED_BLOCK
"""The same in 8 bits, with the maxima of blocks."""


def get_cut_multiple(state: OptimizerState) -> int:
    """Return the number of elements of a parameter of which cuts of the state are multiples."""
    return QUANTISED_BLOCK if state == "8bit" else 1


def count_adamw_8bit_bytes(numel: int) -> int:
    """Return the bytes of AdamW's state in 8 bits of a parameter."""
    if numel < LEAST_QUANTISED:
        return numel * ADAMW_BYTES
    return 2 * numel + 2 * 4 * -(-numel // QUANTISED_BLOCK)
