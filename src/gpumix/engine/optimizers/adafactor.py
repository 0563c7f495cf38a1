"""Adafactor over pieces: a matrix's second moment is factored into rows and columns.

Two all-reduces per step, for any number of parameters that the same ranks divide: first the sums of
squares of rows and columns and the parameters' norms, then the updates' norms, which need the
former. No value is read back to the host.

Shazeer, Stern: Adafactor, https://arxiv.org/abs/1804.04235; the variant is that of torch.optim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from gpumix.engine.optimizers.layout import OptimizerLayout
from gpumix.engine.sharding.nd_boxes import split_into_boxes

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
                _ParameterUpdate(
                    p, group, self._state(p), self.layout.piece(p).shape, self.layout.piece(p).start
                )
                for group in self.param_groups
                for p in group["params"]
                if p.grad is not None and p in part
            ]
            if updates:
                self._step(updates, part.comm)

    def _step(self, updates: list[_ParameterUpdate], comm: Communicator) -> None:
        device = updates[0].local.device
        sums = torch.zeros(sum(u.sums_numel for u in updates), device=device)
        for update, own in zip(updates, sums.split([u.sums_numel for u in updates])):
            update.add_squares(own)
        comm.all_reduce(sums, "all-reduce of Adafactor's rows and columns")
        norms = torch.zeros(len(updates), device=device)
        for update, own, norm in zip(
            updates, sums.split([u.sums_numel for u in updates]), norms.split(1)
        ):
            update.update_averages(own)
            update.add_norm(norm)
        comm.all_reduce(norms, "all-reduce of Adafactor's update norms")
        for update, norm in zip(updates, norms.split(1)):
            update.apply(norm)

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


class _ParameterUpdate:
    """Update of a parameter in a step; `shape` is that of the full parameter."""

    def __init__(
        self, p: nn.Parameter, group: Group, state: State, shape: torch.Size, start: int
    ) -> None:
        self.local, self._gradient = flatten_piece(p), flatten_gradient(p)
        self._group, self._state = group, state
        self._numel, self._start = prod(shape), start
        self._factored = len(shape) > 1
        # A stack of matrices; of one, for a matrix.
        self._shape = (prod(shape[:-2]), *shape[-2:]) if self._factored else (1, 1, prod(shape))
        eps1, self._eps2 = group["eps"]
        self._eps1 = torch.finfo(p.dtype).eps if eps1 is None else eps1
        state["step"] += 1
        self._step = state["step"].item()

    # -- sums over ranks -----------------------------------------------------------------------

    @property
    def sums_numel(self) -> int:
        """Number of values to sum over ranks first."""
        stack, rows, columns = self._shape
        return 1 + (stack * (rows + columns) if self._factored else 0)

    def add_squares(self, sums: torch.Tensor) -> None:
        """Put this rank's sums of squares into `sums`."""
        norm, row_sums, column_sums = self._cut(sums)
        norm.copy_(_square_norm(self.local))
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
        """Add this rank's part of the update's squared norm to `norm`."""
        for _, update in self._updates():
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
        """Yield this rank's interval as at most five boxes."""
        end = self._start + self.local.numel()
        done = 0
        for offset, size in split_into_boxes(self._shape, self._start, end):
            part = slice(done, done + prod(size))
            places = (slice(o, o + n) for o, n in zip(offset, size))
            yield _Tile(self.local[part].view(size), self._gradient[part].view(size), *places)
            done = part.stop


def _square_norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor).square_()
