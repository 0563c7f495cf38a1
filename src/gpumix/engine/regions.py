"""Where ranks that compute a unit together begin and end to compute different parts of it.

What enters such a region is alike on every rank, and so is the gradient that comes out of it: the
sum of what came to each. What leaves it is alike again: the sum of all ranks' parts (Shoeybi et al.
2019, Megatron-LM, f and g), or the parts side by side.
"""

from __future__ import annotations

from typing import Any

import torch

from gpumix.engine.comm import Communicator


def enter(value: torch.Tensor, team: Communicator) -> torch.Tensor:
    """The same value; each rank has a part of its gradient, which are summed."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return value
    return _Enter.apply(value, team)  # type: ignore[no-any-return, no-untyped-call]


def leave(value: torch.Tensor, team: Communicator) -> torch.Tensor:
    """The sum of what all ranks have, in the memory of `value`."""
    return _Leave.apply(value, team)  # type: ignore[no-any-return, no-untyped-call]


def part_of(value: torch.Tensor, dim: int, team: Communicator) -> torch.Tensor:
    """This rank's part of what all have, along `dim`."""
    return _Part.apply(value, dim, team)  # type: ignore[no-any-return, no-untyped-call]


def side_by_side(value: torch.Tensor, dim: int, team: Communicator) -> torch.Tensor:
    """What all ranks have, along `dim`. All do the same with it: so each has the whole gradient."""
    return _SideBySide.apply(value, dim, team)  # type: ignore[no-any-return, no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, team: Communicator) -> torch.Tensor:
        ctx.team = team
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Somebody else may hold what comes here: it is not ours to change.
        summed = gradient.clone(memory_format=torch.contiguous_format)
        return _summed(summed, ctx.team, "sum of gradients in a team"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, team: Communicator) -> torch.Tensor:
        if value.is_contiguous():
            ctx.mark_dirty(value)
        else:
            value = value.contiguous()
        return _summed(value, team, "sum of outputs in a team")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, team: Communicator) -> torch.Tensor:
        ctx.dim, ctx.team = dim, team
        return _own(value, dim, team)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all(gradient, ctx.dim, ctx.team), None, None


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, team: Communicator) -> torch.Tensor:
        ctx.dim, ctx.team = dim, team
        return _all(value, dim, team)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own(gradient, ctx.dim, ctx.team), None, None


def _own(value: torch.Tensor, dim: int, team: Communicator) -> torch.Tensor:
    return value.chunk(team.world, dim)[team.rank].contiguous()


def _summed(value: torch.Tensor, team: Communicator, label: str) -> torch.Tensor:
    """In place."""
    team.record.meets("team")
    value = _summed_now(value, team, label)
    team.record.goes_on()
    return value


def _summed_now(value: torch.Tensor, team: Communicator, label: str) -> torch.Tensor:
    if not team.on_gloo:
        return team.all_reduce(value, label)
    # A thread of gloo's may hold what it was given for longer than it takes: memory of a pool.
    room = team.borrow("team sum", value, 1, value.numel())
    flat = value.view(-1)
    flat.copy_(team.all_reduce(room.tensor[0].copy_(flat), label))
    room.give_back()
    return value


def _all(value: torch.Tensor, dim: int, team: Communicator) -> torch.Tensor:
    team.record.meets("team")
    whole = _all_now(value, dim, team, "gather of parts in a team")
    team.record.goes_on()
    return whole


def _all_now(value: torch.Tensor, dim: int, team: Communicator, label: str) -> torch.Tensor:
    if not team.on_gloo:
        rows, gathered = team.exchange(value.reshape(-1), label)
        gathered.wait()
        return torch.cat([row.view(value.shape) for row in rows], dim)
    room = team.borrow("team gather", value, team.world + 1, value.numel())
    rows, own = room.tensor[:-1], room.tensor[-1]
    _, gathered = team.exchange(own.copy_(value.reshape(-1)), label, into=rows)
    gathered.wait()
    whole = torch.cat([row.view(value.shape) for row in rows], dim)
    room.give_back()
    return whole
