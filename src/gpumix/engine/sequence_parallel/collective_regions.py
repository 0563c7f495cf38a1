"""Tensor-parallel regions, in which the ranks of a group compute different parts of a unit.

Values entering a region are the same on every rank, and so is the gradient coming out: the sum of
all ranks' gradients. Values leaving are the same again: the sum of all ranks' parts (Shoeybi et al.
2019, Megatron-LM, f and g), or the parts concatenated. With positions divided between regions
(Korthikanti et al. 2022), each rank enters with a part of the positions, and leaves with a part of
the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from gpumix.engine.comm.communicator import Communicator
from gpumix.schema.plan.splitting import ShardIntervals


def copy_to_region(value: torch.Tensor, tp_group: Communicator) -> torch.Tensor:
    """Enter a region with `value`; backward sums the ranks' partial gradients."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return value
    return _Enter.apply(value, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from_region(value: torch.Tensor, tp_group: Communicator) -> torch.Tensor:
    """Leave a region with the sum of all ranks' values, in the memory of `value`."""
    return _Leave.apply(value, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def scatter_to_region(value: torch.Tensor, dim: int, tp_group: Communicator) -> torch.Tensor:
    """Return this rank's part of a replicated value, along `dim`."""
    return _Part.apply(value, dim, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def gather_from_region(
    value: torch.Tensor, dim: int, tp_group: Communicator, length: int | None = None
) -> torch.Tensor:
    """Concatenate all ranks' values along `dim`. All ranks use the result alike, so each has the
    full gradient.

    Args:
        length: length of the result, if parts are unequal.
    """
    return _SideBySide.apply(value, dim, tp_group, length)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_gradient(
    part: torch.Tensor, whole: torch.Tensor, dim: int, tp_group: Communicator
) -> torch.Tensor:
    """Enter a region with `whole`, the concatenation of all ranks' parts along `dim`. Each rank has
    a partial gradient of `whole`; `part` gets its slice of their sum."""
    if not (torch.is_grad_enabled() and part.requires_grad):
        return whole
    return _EnterTogether.apply(part, whole.detach(), dim, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_from_region(
    value: torch.Tensor, dim: int, tp_group: Communicator
) -> torch.Tensor:
    """Leave a region with this rank's part, along `dim`, of the sum of all ranks' values."""
    return _LeaveApart.apply(value, dim, tp_group)  # type: ignore[no-any-return, no-untyped-call]


def get_own_part(value: torch.Tensor, dim: int, tp_group: Communicator) -> torch.Tensor:
    """Copy this rank's part along `dim`; a view would hold the whole. With uneven parts, the first
    parts are longer by one."""
    part = value.tensor_split(tp_group.world, dim)[tp_group.rank]
    return part.clone(memory_format=torch.contiguous_format)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, tp_group: Communicator) -> torch.Tensor:
        ctx.tp_group = tp_group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The gradient may have other holders: do not change it.
        summed = gradient.clone(memory_format=torch.contiguous_format)
        label = "sum of gradients in a tensor-parallel group"
        return _all_reduce(summed, ctx.tp_group, label), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, tp_group: Communicator) -> torch.Tensor:
        if value.is_contiguous():
            ctx.mark_dirty(value)
        else:
            value = value.contiguous()
        return _all_reduce(value, tp_group, "sum of outputs in a tensor-parallel group")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, tp_group: Communicator) -> torch.Tensor:
        ctx.dim, ctx.tp_group, ctx.length = dim, tp_group, value.shape[dim]
        return get_own_part(value, dim, tp_group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(gradient, ctx.dim, ctx.tp_group, ctx.length), None, None


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, dim: int, tp_group: Communicator, length: int | None
    ) -> torch.Tensor:
        ctx.dim, ctx.tp_group = dim, tp_group
        return _all_gather(
            value, dim, tp_group, value.shape[dim] * tp_group.world if length is None else length
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return get_own_part(gradient, ctx.dim, ctx.tp_group), None, None, None


class _EnterTogether(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, whole: torch.Tensor, dim: int, tp_group: Communicator
    ) -> torch.Tensor:
        ctx.dim, ctx.tp_group = dim, tp_group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        label = "sum of gradients in a tensor-parallel group, each rank its part"
        return _reduce_scatter(gradient, ctx.dim, ctx.tp_group, label), None, None, None


class _LeaveApart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, tp_group: Communicator) -> torch.Tensor:
        ctx.dim, ctx.tp_group, ctx.length = dim, tp_group, value.shape[dim]
        label = "sum of outputs in a tensor-parallel group, each rank its part"
        return _reduce_scatter(value, dim, tp_group, label)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(gradient, ctx.dim, ctx.tp_group, ctx.length), None, None


def _all_reduce(value: torch.Tensor, tp_group: Communicator, label: str) -> torch.Tensor:
    """Sum over the group, in place."""
    tp_group.record.meets("tensor parallel")
    value = _run_all_reduce(value, tp_group, label)
    tp_group.record.goes_on()
    return value


def _run_all_reduce(value: torch.Tensor, tp_group: Communicator, label: str) -> torch.Tensor:
    if not tp_group.on_gloo:
        return tp_group.all_reduce(value, label)
    # A gloo thread may hold its buffer beyond the call: use pooled memory.
    room = tp_group.borrow("tensor-parallel sum", value, 1, value.numel())
    flat = value.view(-1)
    flat.copy_(tp_group.all_reduce(room.tensor[0].copy_(flat), label))
    room.give_back()
    return value


def _all_gather(value: torch.Tensor, dim: int, tp_group: Communicator, length: int) -> torch.Tensor:
    """Concatenate all ranks' values, `length` in total along `dim`."""
    tp_group.record.meets("tensor parallel")
    whole = _run_all_gather(value, dim, tp_group, length)
    tp_group.record.goes_on()
    return whole


def _run_all_gather(
    value: torch.Tensor, dim: int, tp_group: Communicator, length: int
) -> torch.Tensor:
    label = "gather of parts in a tensor-parallel group"
    shapes = _shapes(value.shape, dim, tp_group.world, length)
    room = shapes[0].numel()  # of the longest part, the first
    if not tp_group.on_gloo:
        own = value.reshape(-1)
        rows, gathered = tp_group.exchange(_filled_up(own, room), label)
        gathered.wait()
        return _joined(rows, shapes, dim)
    borrowed = tp_group.borrow("tensor-parallel gather", value, tp_group.world + 1, room)
    rows, own = borrowed.tensor[:-1], borrowed.tensor[-1]
    own[: value.numel()] = value.reshape(-1)
    _, gathered = tp_group.exchange(own, label, into=rows)
    gathered.wait()
    whole = _joined(rows, shapes, dim)
    borrowed.give_back()
    return whole


def _reduce_scatter(
    value: torch.Tensor, dim: int, tp_group: Communicator, label: str
) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' values."""
    tp_group.record.meets("tensor parallel")
    part = _run_reduce_scatter(value, dim, tp_group, label)
    tp_group.record.goes_on()
    return part


def _run_reduce_scatter(
    value: torch.Tensor, dim: int, tp_group: Communicator, label: str
) -> torch.Tensor:
    parts = value.tensor_split(tp_group.world, dim)
    room, found = (
        parts[0].numel(),
        torch.empty_like(parts[tp_group.rank], memory_format=torch.contiguous_format),
    )
    name = "tensor-parallel scatter"
    borrowed = tp_group.borrow(name, value, tp_group.world, room) if tp_group.on_gloo else None
    rows = value.new_empty(tp_group.world, room) if borrowed is None else borrowed.tensor
    for row, part in zip(rows, parts):
        row[: part.numel()].view(part.shape).copy_(part)

    def deliver(summands: torch.Tensor) -> None:
        torch.sum(summands[:, : found.numel()], 0, out=found.view(-1))

    intervals = ShardIntervals(tuple(number * room for number in range(tp_group.world + 1)))
    tp_group.reduce(rows.view(-1), intervals, label, deliver).wait()
    if borrowed is not None:
        borrowed.give_back()
    return found


def _filled_up(flat: torch.Tensor, numel: int) -> torch.Tensor:
    if flat.numel() == numel:
        return flat
    return functional.pad(flat, (0, numel - flat.numel()))


def _joined(rows: torch.Tensor, shapes: Sequence[torch.Size], dim: int) -> torch.Tensor:
    parts = [row[: shape.numel()].view(shape) for row, shape in zip(rows, shapes)]
    return torch.cat(parts, dim)


def _shapes(of_part: torch.Size, dim: int, parts: int, length: int) -> list[torch.Size]:
    """Return the shapes of all parts, given the shape of one, `length` in total along `dim`."""
    found = []
    for number in range(parts):
        sizes = list(of_part)
        sizes[dim] = length // parts + (number < length % parts)
        found.append(torch.Size(sizes))
    return found
