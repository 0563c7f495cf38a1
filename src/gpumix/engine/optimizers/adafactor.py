"""Adafactor over pieces: a matrix's second moment is factored into rows and columns.

Two all-reduces per step, for any number of parameters that the same ranks divide: first the sums of
squares of rows and columns and the parameters' norms, then the updates' norms, which need the
former. No value is read back to the host.

Shazeer, Stern: Adafactor, https://arxiv.org/abs/1804.04235; the variant is that of torch.optim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import torch
from torch import nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.optimizers.base import (
    FullParameterOptimizer,
    Group,
    Parameters,
    flatten_gradient,
    flatten_piece,
    get_layout,
    to_parameter_groups,
)
from gpumix.engine.optimizers.layout import LayoutPart, OptimizerLayout
from gpumix.engine.sharding.nd_boxes import slice_box
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard import Piece
from gpumix.schema.errors import InputError

State = dict[str, Any]


class Adafactor(FullParameterOptimizer):
    """`torch.optim.Adafactor` for the pieces of an engine, with equal results.

    Args:
        params: pieces, or groups of pieces.
        layout: `engine.layout()`; default: unsharded parameters.
        lr: largest relative size of a step; multiplied by the root mean square of the parameter.
        beta2_decay: decay of the average of squares: 1 - step ** beta2_decay.
        eps: lower bounds of the root of a second moment (None: that of the dtype), and of a
            parameter's root mean square.
        d: largest root mean square of an update before scaling.
        weight_decay: decoupled, times `lr`.
    """

    whole_states = frozenset({"row_var", "col_var"})
    state_bytes = (0, 0)  # rows and columns are few, and vectors short

    # Many arguments, because torch's have as many.
    def __init__(
        self,
        params: Parameters,
        layout: OptimizerLayout | None = None,
        *,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        settings["weight_decay"] = weight_decay
        torch.optim.Adafactor([nn.Parameter(torch.empty(0))], **settings)  # checks the settings
        groups = to_parameter_groups(params)
        super().__init__(groups, settings, get_layout(groups, layout))

    def _update(self) -> None:
        for part in self.layout.parts:
            updates = [
                _PieceUpdate(p, group, self._state(p), part.pieces[id(p)], part)
                for group in self.param_groups
                for p in group["params"]
                if p.grad is not None and p in part
            ]
            if updates:
                self._step(updates, part.comm)

    def _step(self, updates: list[_PieceUpdate], comm: Communicator) -> None:
        device = updates[0].local.device
        # A rank may have several parts of a parameter, whose sums are one.
        sizes = {update.name: update.sums_numel for update in updates}
        every = torch.zeros(sum(sizes.values()), device=device)
        sums = dict(zip(sizes, every.split(list(sizes.values()))))
        for update in updates:
            update.add_squares(sums[update.name])
        comm.all_reduce(every, "all-reduce of Adafactor's rows and columns")
        square_norms = torch.zeros(len(sizes), device=device)
        norms = dict(zip(sizes, square_norms.split(1)))
        for update in updates:
            update.update_averages(sums[update.name])
            update.add_norm(norms[update.name])
        comm.all_reduce(square_norms, "all-reduce of Adafactor's update norms")
        for update in updates:
            update.apply(norms[update.name])

    def _state(self, p: nn.Parameter) -> State:
        state: State = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the host, where it is used
            for name, shape in get_average_shapes(self.layout.piece(p).shape).items():
                zeros = torch.zeros_like(p) if shape is None else p.new_zeros(shape)
                state[name] = zeros.detach()
        return state


def get_average_shapes(shape: torch.Size) -> dict[str, torch.Size | None]:
    """Return the averages of a gradient's squares, by name, with shapes; None where sharded like
    the parameter."""
    if len(shape) < 2:
        return {"variance": None}
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return {"row_var": torch.Size(rows), "col_var": torch.Size(columns)}


@dataclass(frozen=True)
class _Tile:
    """A box of a stack of matrices, stored in full on this rank: views of the parameter and the
    gradient, and slices of the stack."""

    local: torch.Tensor
    gradient: torch.Tensor
    stack: slice
    rows: slice
    columns: slice


class _PieceUpdate:
    """Update of a piece of a parameter in a step."""

    def __init__(
        self, p: nn.Parameter, group: Group, state: State, piece: Piece, part: LayoutPart
    ) -> None:
        self.name = piece.name
        self.local, self._gradient = flatten_piece(p), flatten_gradient(p)
        self._group, self._state = group, state
        self._is_first = part.is_first(piece)
        self._numel = prod(piece.shape)
        self._factored = len(piece.shape) > 1
        # A stack of matrices; of one, for a matrix.
        self._window, self._start = _stack_matrices(piece.window), piece.start
        eps1, self._eps2 = group["eps"]
        self._eps1 = torch.finfo(p.dtype).eps if eps1 is None else eps1
        state["step"] += 1
        self._step = state["step"].item()

    @property
    def _shape(self) -> torch.Size:
        return self._window.shape

    # -- sums over ranks -----------------------------------------------------------------------

    @property
    def sums_numel(self) -> int:
        """Number of values to sum over ranks first."""
        stack, rows, columns = self._shape
        return 1 + (stack * (rows + columns) if self._factored else 0)

    def add_squares(self, sums: torch.Tensor) -> None:
        """Add the piece's sums of squares to `sums`, if no other rank does."""
        if not self._is_first:
            return
        norm, row_sums, column_sums = self._cut(sums)
        norm += _square_norm(self.local)
        if self._factored:
            for tile in self._tiles():
                along_rows = torch.linalg.vector_norm(tile.gradient, dim=2).square_()
                row_sums[tile.stack, tile.rows] += along_rows
                along_columns = torch.linalg.vector_norm(tile.gradient, dim=1).square_()
                column_sums[tile.stack, tile.columns] += along_columns

    def update_averages(self, sums: torch.Tensor) -> None:
        """Update the averages of squares from the sums of all ranks."""
        norm, row_sums, column_sums = self._cut(sums)
        self._square = norm
        weight = self._step ** self._group["beta2_decay"]
        if self._factored:
            _, rows, columns = self._shape
            row_var, col_var = self._state["row_var"], self._state["col_var"]
            for average, total, count in (
                (row_var, row_sums, columns),
                (col_var, column_sums, rows),
            ):
                now = total.view(average.shape) / max(1, count)
                average.lerp_(now.to(average.dtype), weight)
        else:
            flatten_piece(self._state["variance"]).lerp_(self._gradient.square(), weight)

    def _cut(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stack, rows, columns = self._shape
        if not self._factored:
            return sums[:1], sums[1:], sums[1:]
        norm, row_sums, column_sums = sums.split([1, stack * rows, stack * columns])
        return norm, row_sums.view(stack, rows), column_sums.view(stack, columns)

    # -- the update ----------------------------------------------------------------------------

    def add_norm(self, norm: torch.Tensor) -> None:
        """Add the piece's part of the update's squared norm to `norm`, if no other rank does."""
        for _, update in self._updates() if self._is_first else ():
            norm += _square_norm(update)

    def apply(self, norm: torch.Tensor) -> None:
        """Update the parameter, given the update's squared norm."""
        rate = min(self._group["lr"], 1 / sqrt(self._step))
        numel = max(1, self._numel)
        size = (self._square / numel).sqrt().clamp_(min=self._eps2) * rate
        scale = size / ((norm / numel).sqrt() / self._group["d"]).clamp_(min=1.0)
        if self._group["weight_decay"] != 0:
            self.local.mul_(1 - self._group["lr"] * self._group["weight_decay"])
        for local, update in self._updates():
            local.sub_(update.mul_(scale))

    def _updates(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of the parameter with unscaled updates. Recomputed on each call, to keep at
        most one update in memory."""
        for tile in self._tiles():
            update = self._variance(tile).clamp_(min=self._eps1**2).rsqrt_()
            yield tile.local, update.mul_(tile.gradient)

    def _variance(self, tile: _Tile) -> torch.Tensor:
        """Estimate a tile's second moment, in new memory."""
        if not self._factored:
            return flatten_piece(self._state["variance"]).clone().view(tile.local.shape)
        stack, rows, columns = self._shape
        row_var = self._state["row_var"].view(stack, rows, 1)[tile.stack]
        col_var = self._state["col_var"].view(stack, 1, columns)[tile.stack]
        mean = row_var.mean(dim=1, keepdim=True).clamp_(min=self._eps1)
        return (row_var[:, tile.rows] @ col_var[:, :, tile.columns]).div_(mean)

    def _tiles(self) -> Iterator[_Tile]:
        """Yield this rank's elements as boxes; of a whole matrix's interval at most three."""
        if not self._factored:
            everything = (slice(None),) * 3
            yield _Tile(self.local.view(1, 1, -1), self._gradient.view(1, 1, -1), *everything)
            return
        found = self._window.boxes(self._start, self.local)
        gradients = self._window.boxes(self._start, self._gradient)
        for (box, local), (_, gradient) in zip(found, gradients):
            yield _Tile(local, gradient, *slice_box(box))


def _stack_matrices(window: ParameterSlice) -> ParameterSlice:
    """Return the window of a parameter as a stack of matrices.

    Raises:
        InputError: a tensor-parallel group divides the parameter along a dimension between the
            first and the last two.
    """
    shape, inner = window.shape, max(0, len(window.shape) - 2)
    if len(shape) < 2:
        return ParameterSlice(torch.Size([1, 1, prod(shape)]))
    stack = torch.Size([prod(shape[:-2]), *shape[-2:]])
    if window.whole:
        return ParameterSlice(stack)
    if 0 < window.dim < inner:
        raise InputError(
            f"Adafactor cannot update a parameter of shape {tuple(shape)} that a tensor-parallel "
            f"group divides along dimension {window.dim}",
            code="optimizer-parameter-divided",
            fix="divide it along the first dimension or one of the last two, or use "
            "torch.optim.AdamW",
        )
    dim = window.dim - inner + 1 if window.dim >= inner else 0
    return replace(window, shape=stack, dim=dim)


def _square_norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor).square_()
