"""Flat intervals of an N-dimensional tensor as boxes.

Ranks own flat intervals. Checkpoints contain boxes (an offset and a size in every dimension), which
locate elements independently of ownership. Each box is a contiguous part of the interval, hence a
view.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]


def slice_box(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in its tensor."""
    return tuple(slice(begin, begin + length) for begin, length in zip(*box))


def split_into_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes (offset, size) that cover elements [start, end) of a tensor, in order.

    At most 2 * dimensions - 1 boxes; a tensor without dimensions has the one box ((), ()).

    Raises:
        ValueError: the interval is not inside the tensor.
    """
    if not 0 <= start <= end <= prod(shape):
        raise ValueError(f"[{start}, {end}) is not inside a tensor of shape {tuple(shape)}")
    return _cover_interval(tuple(shape), start, end) if start < end else []


def _cover_interval(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Return the boxes of a non-empty interval: end of a row, full rows, start of a row."""
    if not shape:
        return [((), ())]
    row, inner = prod(shape[1:]), shape[1:]
    first, head = divmod(start, row)
    last, tail = divmod(end, row)
    if first == last:
        return _prepend_row(first, _cover_interval(inner, head, tail))
    found: list[Box] = []
    if head:
        found += _prepend_row(first, _cover_interval(inner, head, row))
        first += 1
    if first < last:
        found.append(((first, *(0,) * len(inner)), (last - first, *inner)))
    if tail:
        found += _prepend_row(last, _cover_interval(inner, 0, tail))
    return found


def _prepend_row(row: int, found: list[Box]) -> list[Box]:
    return [((row, *offset), (1, *size)) for offset, size in found]
