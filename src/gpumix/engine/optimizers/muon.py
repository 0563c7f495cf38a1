"""Muon over pieces: orthogonal updates for hidden matrices, AdamW for all else.

Momentum is sharded like parameters. Orthogonalization needs full matrices: a rank that stores a
full matrix does it locally. Any other matrix is done by one rank, which gets the pieces in one
exchange of all ranks and returns the result in a second. Both exchanges are in bf16, the dtype of
the iteration.

Jordan: Muon, https://kellerjordan.github.io/posts/muon/; Liu et al.: Muon is Scalable for LLM
Training, https://arxiv.org/abs/2502.16982, which divides the work likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from gpumix.engine.optimizers.layout import LayoutPart, OptimizerLayout, StoredPart
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
    exchanges_matrices = True

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
        for part in self.layout.parts:
            matrices: dict[str, _Matrix] = {}
            for group in self.param_groups:
                for p in group["params"] if group["use_muon"] else ():
                    if p.grad is None or p not in part:
                        continue
                    name = part.pieces[id(p)].name
                    if part.stored[name]:  # it has elements
                        matrices.setdefault(name, _Matrix(name, group, part)).add(p)
            if matrices:
                self._orthogonal_step(list(matrices.values()), part)
        # It may have old state; loaded state is here.
        self._adamw.state = self.state
        self._adamw.param_groups = [g for g in self.param_groups if not g["use_muon"]]
        self._adamw.step()

    def _orthogonal_step(self, matrices: list[_Matrix], part: LayoutPart) -> None:
        comm = part.comm
        for matrix in matrices:
            matrix.average(self.state)
        own = [m for m in matrices if comm.rank in m.holders]
        cut = [m for m in matrices if not m.holders]
        travel = _MatrixExchange(cut, _choose_owners(matrices, cut, part), comm)
        arriving = travel.start()
        for matrix in own:  # while the other matrices' parts travel
            [piece] = matrix.pieces
            piece.update = matrix.orthogonalize(piece.update.view(matrix.shape)).reshape(-1)
        travel.finish(arriving)
        for matrix in matrices:
            matrix.apply()


def _choose_owners(matrices: list[_Matrix], cut: list[_Matrix], part: LayoutPart) -> list[int]:
    """Return the rank that updates each matrix of `cut`, equal on all ranks."""
    busy = [0.0] * part.comm.world
    for matrix in matrices:
        for holder in matrix.holders:
            busy[holder] += matrix.cost
    held = [list(map(float, _count_by_rank([m], part.comm.world, copies=False))) for m in cut]
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


@dataclass(eq=False)
class _MatrixPiece:
    """A piece of a matrix. `update` is its momentum, then its part of the orthogonal update."""

    parameter: nn.Parameter
    part: StoredPart
    update: torch.Tensor


class _Matrix:
    """Update of a matrix in a step. `pieces` are this rank's, in the order of `stored`."""

    def __init__(self, name: str, group: Group, part: LayoutPart) -> None:
        self.stored = part.stored[name]
        self.pieces: list[_MatrixPiece] = []
        self._given: list[nn.Parameter] = []
        self._group, self._part = group, part

    def add(self, parameter: nn.Parameter) -> None:
        """Add a piece of the matrix on this rank."""
        self._given.append(parameter)

    @property
    def shape(self) -> torch.Size:
        return self.stored[0].window.shape

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The ranks that store the full matrix, if no rank stores a part."""
        if all(part.is_whole for part in self.stored):
            return tuple(part.rank for part in self.stored)
        return ()

    @property
    def cost(self) -> float:
        """Number of multiplications per step of the iteration."""
        short, long = sorted(self.shape)
        return float(short * short * (2 * long + short))

    def average(self, states: Mapping[torch.Tensor, Any]) -> None:
        """Update the momentum."""
        momentum = self._group["momentum"]
        own = {p.window.part: p for p in self.stored if p.rank == self._part.comm.rank}
        for parameter in self._given:
            gradient, state = flatten_gradient(parameter), states[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter).detach()
            buffer = flatten_piece(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
            update = gradient.lerp(buffer, momentum) if self._group["nesterov"] else buffer
            part = own.get(self._part.pieces[id(parameter)].window.part)
            if part is not None:
                self.pieces.append(_MatrixPiece(parameter, part, update.bfloat16()))
        self.pieces.sort(key=lambda piece: piece.part.window.part)

    def orthogonalize(self, whole: torch.Tensor) -> torch.Tensor:
        """Orthogonalize the full matrix."""
        return orthogonalize(
            whole,
            self._group["ns_coefficients"],
            steps=self._group["ns_steps"],
            eps=self._group["ns_eps"],
        )

    def apply(self) -> None:
        lr = self._group["lr"]
        for piece in self.pieces:
            local = flatten_piece(piece.parameter)
            local.mul_(1 - lr * self._group["weight_decay"])
            local.add_(piece.update, alpha=-lr * _lr_ratio(self._group["adjust_lr_fn"], self.shape))
        self.pieces.clear()


@dataclass(frozen=True)
class _MatrixExchange:
    """Exchange of sharded matrices with the orthogonalizing ranks.

    Between two ranks, data is in the order of the matrices, and of a matrix in that of tensor-
    parallel parts. The first copy of an element is sent, and all copies are returned.
    """

    matrices: Sequence[_Matrix]
    owners: Sequence[int]
    comm: Communicator

    def start(self) -> tuple[torch.Tensor, Any] | None:
        """Send this rank's parts to the owners."""
        if not self.matrices:
            return None
        sent = [piece.update for piece in self._own_pieces() if piece.part.first]
        device = self.comm.device
        return self.comm.exchange_parts(
            torch.cat(sent) if sent else torch.empty(0, dtype=torch.bfloat16, device=device),
            self._count_for_owners(copies=False),
            self._count_from_holders(copies=False),
            "exchange of Muon's momentum",
        )

    def finish(self, arriving: tuple[torch.Tensor, Any] | None) -> None:
        """Orthogonalize this rank's matrices, and return the parts to all ranks."""
        if arriving is None:
            return
        received, pending = arriving
        pending.wait()
        done = self._orthogonalize(received)
        sent = torch.cat(
            [part.take(done[m]) for m, part in self._places(copies=True)] or [received]
        )
        returned, pending = self.comm.exchange_parts(
            sent,
            self._count_from_holders(copies=True),
            self._count_for_owners(copies=True),
            "exchange of Muon's updates",
        )
        pending.wait()
        back = self._own_pieces()
        for piece, part in zip(back, returned.split([piece.part.numel for piece in back])):
            piece.update = part

    def _orthogonalize(self, received: torch.Tensor) -> dict[_Matrix, torch.Tensor]:
        """Assemble and orthogonalize this rank's matrices."""
        wholes = {m: received.new_empty(m.shape) for m in self._mine}
        places = self._places(copies=False)
        for (matrix, part), flat in zip(places, received.split([p.numel for _, p in places])):
            part.put(flat, wholes[matrix])
        return {matrix: matrix.orthogonalize(whole) for matrix, whole in wholes.items()}

    def _places(self, *, copies: bool) -> list[tuple[_Matrix, StoredPart]]:
        """Return stored parts of this rank's matrices by storing rank, the order of travelling
        data."""
        places = [(m, part) for m in self._mine for part in m.stored if copies or part.first]
        return sorted(places, key=lambda place: place[1].rank)

    def _own_pieces(self) -> list[_MatrixPiece]:
        """Return this rank's pieces by owner."""
        ranks = range(self.comm.world)
        return [piece for owner in ranks for m in self._of(owner) for piece in m.pieces]

    @cached_property
    def _mine(self) -> list[_Matrix]:
        return self._of(self.comm.rank)

    def _of(self, owner: int) -> list[_Matrix]:
        return [m for m, chosen in zip(self.matrices, self.owners) if chosen == owner]

    def _count_for_owners(self, *, copies: bool) -> list[int]:
        """Return the number of elements from this rank to each owner."""
        counts = [0] * self.comm.world
        for matrix, owner in zip(self.matrices, self.owners):
            own = (piece.part for piece in matrix.pieces)
            counts[owner] += sum(part.numel for part in own if copies or part.first)
        return counts

    def _count_from_holders(self, *, copies: bool) -> list[int]:
        """Return the number of elements from each rank to this rank."""
        return _count_by_rank(self._mine, self.comm.world, copies=copies)


def _count_by_rank(matrices: Iterable[_Matrix], world: int, *, copies: bool) -> list[int]:
    """Count the elements of `matrices` that each rank stores, with copies or without."""
    counts = [0] * world
    for part in (part for matrix in matrices for part in matrix.stored):
        counts[part.rank] += part.numel if copies or part.first else 0
    return counts


def _lr_ratio(adjust: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns))
