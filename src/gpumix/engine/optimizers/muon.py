"""Muon over pieces: orthogonal updates for hidden matrices, AdamW for all else.

Momentum is sharded like parameters. Orthogonalization needs full matrices: a rank that stores a
full matrix does it locally. Any other matrix is done by one rank, which gets the pieces in one
exchange of all ranks and returns the result in a second. Both exchanges are in bf16, the dtype of
the iteration.

Jordan: Muon, https://kellerjordan.github.io/posts/muon/; Liu et al.: Muon is Scalable for LLM
Training, https://arxiv.org/abs/2502.16982, which divides the work likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, Literal

import torch
from torch import nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.optimizers.assign_work import assign_jobs
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
from gpumix.engine.optimizers.newton_schulz import JORDAN_COEFFICIENTS, Coefficients, orthogonalize
from gpumix.schema.errors import InputError

AdjustLr = Literal["original", "match_rms_adamw"]


class Muon(FullParameterOptimizer):
    """`torch.optim.Muon` for an engine's hidden matrices and `torch.optim.AdamW` for all else, with
    equal results.

    A hidden matrix is a two-dimensional parameter in a unit; embeddings and heads are outside, in
    the root. A group with `use_muon` overrides this for its parameters.

    Args:
        params: pieces, or groups of pieces.
        layout: `engine.layout()`; default: unsharded parameters.
        lr, weight_decay: of both.
        momentum, nesterov, ns_coefficients, ns_eps, ns_steps, adjust_lr_fn: of Muon, as in torch.
            With "match_rms_adamw" both can share an `lr`, that of AdamW.
        betas, eps: of AdamW.
    """

    state_bytes = (4, 8)

    # Many arguments, because torch's two optimizers have as many.
    def __init__(
        self,
        params: Parameters,
        layout: OptimizerLayout | None = None,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = JORDAN_COEFFICIENTS,
        ns_eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        common: Group = {"lr": lr, "weight_decay": weight_decay}
        of_muon: Group = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        # Makes and checks the settings, and does AdamW's part of each step.
        self._adamw = torch.optim.AdamW(
            [nn.Parameter(torch.empty(0))], betas=betas, eps=eps, **common
        )
        torch.optim.Muon([nn.Parameter(torch.empty(0, 0))], eps=ns_eps, **of_muon, **common)
        groups = to_parameter_groups(params)
        layout = get_layout(groups, layout)
        defaults = {**self._adamw.defaults, "fused": True, **of_muon, "ns_eps": ns_eps}
        super().__init__(_split_groups(groups, layout), defaults, layout)

    def _update(self) -> None:
        matrices = [
            _Matrix(p, group, self.layout)
            for group in self.param_groups
            for p in group["params"]
            if group["use_muon"] and p.grad is not None
        ]
        for part in self.layout.parts:
            own = [matrix for matrix in matrices if matrix.parameter in part]
            if own:
                self._orthogonal_step(own, part)
        # It may have old state; loaded state is here.
        self._adamw.state = self.state
        self._adamw.param_groups = [g for g in self.param_groups if not g["use_muon"]]
        self._adamw.step()

    def _orthogonal_step(self, matrices: list[_Matrix], part: LayoutPart) -> None:
        comm = part.comm
        for matrix in matrices:
            matrix.average(self.state[matrix.parameter])
        own = [m for m in matrices if m.holder == comm.rank]
        cut = [m for m in matrices if m.holder is None]
        travel = _MatrixExchange(cut, _choose_owners(matrices, cut, part), comm)
        arriving = travel.start()
        for matrix in own:  # while the other matrices' parts travel
            matrix.update = matrix.orthogonalize(matrix.update)
        travel.finish(arriving)
        for matrix in matrices:
            matrix.apply()


def _choose_owners(matrices: list[_Matrix], cut: list[_Matrix], part: LayoutPart) -> list[int]:
    """Return the rank that updates each matrix of `cut`, equal on all ranks."""
    busy = [0.0] * part.comm.world
    for matrix in matrices:
        if matrix.holder is not None:
            busy[matrix.holder] += matrix.cost
    held = [[float(end - start) for start, end in m.intervals] for m in cut]
    return assign_jobs([m.cost for m in cut], part.speeds, busy=busy, near=held)


def _split_groups(groups: list[Group], layout: OptimizerLayout) -> list[Group]:
    """Split groups into groups of hidden matrices only and groups of other parameters only."""
    divided: list[Group] = []
    for group in groups:
        for use_muon in (True, False):
            chosen = [p for p in group["params"] if _wants_muon(p, group, layout) == use_muon]
            if chosen:
                divided.append({**group, "params": chosen, "use_muon": use_muon})
    return divided


def _wants_muon(parameter: nn.Parameter, group: Group, layout: OptimizerLayout) -> bool:
    if parameter not in layout:
        return False  # refused by name when it is added
    if "use_muon" not in group:
        return layout.is_hidden_matrix(parameter)
    piece = layout.piece(parameter)
    if group["use_muon"] and len(piece.shape) != 2:
        raise InputError(
            f"Muon cannot update parameter '{piece.name}' of shape {tuple(piece.shape)}",
            code="muon-shape-unsupported",
            why="it makes matrices orthogonal",
            fix="leave it out of the group with `use_muon`",
        )
    return bool(group["use_muon"])


class _Matrix:
    """Update of a matrix in a step. `update` is this rank's interval of the momentum, then of the
    orthogonal update."""

    update: torch.Tensor

    def __init__(self, parameter: nn.Parameter, group: Group, layout: OptimizerLayout) -> None:
        self.parameter = parameter
        self.intervals = layout.intervals(parameter)
        self.shape = layout.piece(parameter).shape
        self._group = group

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @cached_property
    def holder(self) -> int | None:
        """The rank that stores the full matrix, if any."""
        whole = (rank for rank, part in enumerate(self.intervals) if part == (0, self.numel))
        return next(whole, None)

    @property
    def cost(self) -> float:
        """Number of multiplications per step of the iteration."""
        short, long = sorted(self.shape)
        return float(short * short * (2 * long + short))

    def average(self, state: dict[str, Any]) -> None:
        """Update the momentum."""
        gradient, momentum = flatten_gradient(self.parameter), self._group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(self.parameter).detach()
        buffer = flatten_piece(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if self._group["nesterov"] else buffer
        self.update = update.bfloat16()

    def orthogonalize(self, whole: torch.Tensor) -> torch.Tensor:
        """Orthogonalize the full matrix, flat."""
        made = orthogonalize(
            whole.view(self.shape),
            self._group["ns_coefficients"],
            steps=self._group["ns_steps"],
            eps=self._group["ns_eps"],
        )
        return made.reshape(-1)

    def apply(self) -> None:
        lr, local = self._group["lr"], flatten_piece(self.parameter)
        local.mul_(1 - lr * self._group["weight_decay"])
        local.add_(self.update, alpha=-lr * _lr_ratio(self._group["adjust_lr_fn"], self.shape))
        del self.update


@dataclass(frozen=True)
class _MatrixExchange:
    """Exchange of sharded matrices with the orthogonalizing ranks.

    Between two ranks, data is in the order of the matrices.
    """

    matrices: Sequence[_Matrix]
    owners: Sequence[int]
    comm: Communicator

    def start(self) -> tuple[torch.Tensor, Any] | None:
        """Send this rank's parts to the owners."""
        if not self.matrices:
            return None
        ranks = range(self.comm.world)
        parts = [m.update for owner in ranks for m in self._of(owner)]
        return self.comm.exchange_parts(
            torch.cat(parts), self._for_owners, self._from_holders, "exchange of Muon's momentum"
        )

    def finish(self, arriving: tuple[torch.Tensor, Any] | None) -> None:
        """Orthogonalize this rank's matrices, and return the parts to all ranks."""
        if arriving is None:
            return
        received, pending = arriving
        pending.wait()
        comm = self.comm
        done = self._done(received)
        sent = torch.cat([done[m][a:b] for a, b, m in self._places()] or [received])
        returned, pending = comm.exchange_parts(
            sent, self._from_holders, self._for_owners, "exchange of Muon's updates"
        )
        pending.wait()
        back = [m for owner in range(comm.world) for m in self._of(owner)]
        for matrix, part in zip(back, returned.split([m.update.numel() for m in back])):
            matrix.update = part

    def _done(self, received: torch.Tensor) -> dict[_Matrix, torch.Tensor]:
        """Assemble and orthogonalize this rank's matrices."""
        wholes = {m: received.new_empty(m.numel) for m in self._mine}
        places = self._places()
        for (a, b, matrix), part in zip(places, received.split([b - a for a, b, _ in places])):
            wholes[matrix][a:b] = part
        return {matrix: matrix.orthogonalize(whole) for matrix, whole in wholes.items()}

    def _places(self) -> list[tuple[int, int, _Matrix]]:
        """Return intervals of this rank's matrices by storing rank, the order of received data."""
        ranks = range(self.comm.world)
        return [(*m.intervals[holder], m) for holder in ranks for m in self._mine]

    @cached_property
    def _mine(self) -> list[_Matrix]:
        return self._of(self.comm.rank)

    def _of(self, owner: int) -> list[_Matrix]:
        return [m for m, chosen in zip(self.matrices, self.owners) if chosen == owner]

    @cached_property
    def _for_owners(self) -> list[int]:
        """Number of elements from this rank to each owner."""
        rank = self.comm.rank
        return [_numel(rank, self._of(owner)) for owner in range(self.comm.world)]

    @cached_property
    def _from_holders(self) -> list[int]:
        """Number of elements from each rank to this rank."""
        return [_numel(holder, self._mine) for holder in range(self.comm.world)]


def _numel(holder: int, matrices: Iterable[_Matrix]) -> int:
    """Count the elements of `matrices` that rank `holder` stores."""
    return sum(end - start for start, end in (m.intervals[holder] for m in matrices))


def _lr_ratio(adjust: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns))
