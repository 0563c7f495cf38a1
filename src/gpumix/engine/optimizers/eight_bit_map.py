"""Dynamic 8-bit maps, and moments that are quantised by them in blocks.

A map has 256 values between -1 and 1, or 0 and 1, denser at zero. A byte is the number of a value,
which the maximum of the element's block scales. Maps and rounding are those of bitsandbytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from gpumix.schema.plan.optimizer_state import QUANTISED_BLOCK

DECADES = 7  # powers of ten between the largest and the smallest values
SMALLEST = 1e-38  # the least maximum with a finite reciprocal


@dataclass(frozen=True)
class QuantisedMoment:
    """Blocks of a moment: bytes, and a maximum for each block. The last block may be shorter."""

    codes: torch.Tensor
    maxima: torch.Tensor
    signed: bool

    def dequantise(self) -> torch.Tensor:
        """Return the values, in new memory."""
        values = get_map(self.signed, self.codes.device).values
        found = torch.index_select(values, 0, self.codes.int())
        return _in_blocks(found).mul_(self.maxima[:, None]).view(-1)[: found.numel()]

    def quantise(self, values: torch.Tensor) -> None:
        """Set the moment to `values`: each becomes the nearest one of the map, the smaller one of
        two that are equally near."""
        rows = _in_blocks(values)
        torch.amax(rows.abs(), 1, out=self.maxima)
        scale = self.maxima.clamp(min=SMALLEST).reciprocal_()
        scaled = (rows * scale[:, None]).clamp_(-1.0, 1.0).view(-1)[: values.numel()]
        self.codes.copy_(get_map(self.signed, values.device).find_nearest(scaled))


@dataclass(frozen=True)
class DynamicMap:
    """Values of bytes in ascending order.

    Attributes:
        bounds: between values, and infinity above the last.
        first: by the upper half of a number's bits, the least byte of such numbers. The next bound
            is the only one that can be among them: a search is one comparison.
    """

    values: torch.Tensor
    bounds: torch.Tensor
    first: torch.Tensor

    def find_nearest(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the nearest values, of two equally near ones the smaller."""
        upper = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        first = torch.index_select(self.first, 0, upper)
        bounds = torch.index_select(self.bounds, 0, first.int())
        return first.add_(scaled > bounds)


@cache
def get_map(signed: bool, device: torch.device) -> DynamicMap:
    """Return a map on a device."""
    values = torch.tensor(make_values(signed=signed))
    bounds = (values[:-1] + values[1:]) / 2
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    negative = upper < 0
    # Of negative numbers, more bits are a smaller one.
    least = torch.where(negative, upper | 0xFFFF, upper).view(torch.float32).nan_to_num(0.0)
    first = torch.bucketize(least, bounds).to(torch.uint8)
    above = torch.cat([bounds, torch.tensor([torch.inf])])
    return DynamicMap(values.to(device), above.to(device), first.to(device))


def make_values(*, signed: bool) -> list[float]:
    """Return the 256 values of a map: in each decade twice as many as in the one below, equally
    far from each other; and 0 and 1."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        ends = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
        means = 10.0 ** (decade + 1 - DECADES) * ((ends[:-1] + ends[1:]) / 2.0)
        found += means.tolist()
        if signed:
            found += (-means).tolist()
    return sorted(found)


def _in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """Return rows of whole blocks: a view, or a copy with zeros at the end."""
    lacking = -flat.numel() % QUANTISED_BLOCK
    return functional.pad(flat, (0, lacking)).view(-1, QUANTISED_BLOCK)
