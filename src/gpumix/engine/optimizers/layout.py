"""Layout of parameters over ranks, for optimizers that are not element-wise. Made by
`Engine.layout`, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard import Piece
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan

Interval = tuple[int, int]


class LayoutPart:
    """Pieces of the parameters that the same ranks divide: all of them, or those of a pipeline
    stage, or those that stages share. Construction is collective.

    Args:
        pieces: this rank's, trained or not; in equal order on every rank.
        comm: exactly the ranks that shard the state.
        speeds: relative speeds of ranks, to divide work; default: equal.

    Raises:
        InputError: the pieces of these ranks do not add up to full parameters.
    """

    def __init__(
        self, pieces: Iterable[Piece], comm: Communicator, speeds: Sequence[float] | None = None
    ) -> None:
        self.comm = comm
        self.speeds = tuple(speeds or [1.0] * comm.world)
        # The pieces are kept, so no id can come to mean another tensor.
        self.pieces = {id(piece.parameter): piece for piece in pieces}
        self.intervals = dict(zip(self.pieces, self._told()))
        for key, piece in self.pieces.items():
            _check_complete(piece, self.intervals[key])

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.pieces

    def _told(self) -> list[tuple[Interval, ...]]:
        """Exchange all ranks' intervals of each piece."""
        mine = [(piece.start, piece.end) for piece in self.pieces.values()]
        row = torch.tensor(mine, dtype=torch.int64, device=self.comm.device).view(-1)
        table = self.comm.exchanged(row, "exchange of who stores what")
        by_rank = table.view(self.comm.world, len(mine), 2).tolist()
        return [tuple((start, end) for start, end in of_piece) for of_piece in zip(*by_rank)]


class OptimizerLayout:
    """The pieces of a model's parameters on all ranks.

    Args:
        parts: this rank's, in an order in which no two ranks wait for each other.
        root: names of the parameters outside of units: embeddings, the head, and the like.
    """

    def __init__(self, parts: Sequence[LayoutPart], *, root: Collection[str] = ()) -> None:
        self.parts = tuple(parts)
        self._root = frozenset(root)
        self.of_engine = True

    @classmethod
    def of_whole(cls, parameters: Iterable[nn.Parameter]) -> OptimizerLayout:
        """Make the layout of unsharded parameters of any shape."""
        parameters = list(parameters)
        device = parameters[0].device if parameters else torch.device("cpu")
        pieces = [
            Piece(str(i), ParameterSlice(p.shape), 0, p.numel(), p)
            for i, p in enumerate(parameters)
        ]
        layout = cls([LayoutPart(pieces, Communicator(None, rank=0, world=1, device=device))])
        layout.of_engine = False
        return layout

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return any(parameter in part for part in self.parts)

    def piece(self, parameter: nn.Parameter) -> Piece:
        """Return this rank's piece of an optimizer's `parameter`."""
        return self._part_of(parameter).pieces[id(parameter)]

    def intervals(self, parameter: nn.Parameter) -> tuple[Interval, ...]:
        """Return each rank's (start, end) of a parameter, of the ranks that divide it."""
        return self._part_of(parameter).intervals[id(parameter)]

    def is_hidden_matrix(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is a matrix inside a unit, so neither embedding nor head."""
        piece = self.piece(parameter)
        return len(piece.shape) == 2 and piece.name not in self._root and prod(piece.shape) > 0

    def _part_of(self, parameter: nn.Parameter) -> LayoutPart:
        return next(part for part in self.parts if parameter in part)


def _check_complete(piece: Piece, intervals: Sequence[Interval]) -> None:
    stored = sorted(interval for interval in intervals if interval[0] < interval[1])
    ends = [0, *(place for interval in stored for place in interval), prod(piece.shape)]
    if any(a != b for a, b in list(pairwise(ends))[::2]):
        raise InputError(
            f"the ranks do not store the whole of parameter '{piece.name}', each element once",
            code="parameter-not-stored-once",
            why=f"of its {prod(piece.shape)} elements they have {stored}",
            fix="give the communicator of those ranks that divide the state among them",
        )


def check_whole_matrices(plan: Plan) -> None:
    """Check that each rank computes with whole matrices.

    Raises:
        InputError: the plan has tensor parallelism.
    """
    if plan.uses_tensor_parallel:
        raise InputError(
            "Adafactor and Muon do not run with tensor parallelism yet",
            code="optimizer-without-tensor-parallel",
            why="a rank of a tensor-parallel group has a part of each row or column of a matrix",
            fix="use torch.optim.AdamW, or a plan without tensor parallelism",
        )
