"""Layout of parameters over ranks, for optimizers that are not element-wise. Made by
`Engine.layout`, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.sharding.nd_boxes import slice_box
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard import Piece
from gpumix.schema.errors import InputError


@dataclass(frozen=True)
class StoredPart:
    """Elements [start, end) of a parameter's window, flattened, on rank `rank`.

    Attributes:
        first: False for a copy of elements that another rank has too, which represents all copies.
    """

    rank: int
    window: ParameterSlice
    start: int
    end: int
    first: bool

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """True if it has the full parameter."""
        return self.window.whole and self.numel == self.window.numel

    def put(self, flat: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the elements into the full parameter."""
        for box, view in self.window.boxes(self.start, flat):
            whole[slice_box(box)] = view

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of the full parameter, flat."""
        flat = whole.new_empty(self.numel)
        for box, view in self.window.boxes(self.start, flat):
            view.copy_(whole[slice_box(box)])
        return flat


class JoinedGroups(NamedTuple):
    """All ranks of a stage with tensor-parallel groups, and their relative speeds."""

    comm: Communicator
    speeds: tuple[float, ...]


class LayoutPart:
    """Pieces of the parameters that the same ranks divide: all of them, or those of a pipeline
    stage, or those that stages share. Construction is collective.

    Args:
        pieces: this rank's, trained or not; of equal parameters in equal order on every rank.
        comm: exactly the ranks that shard the state.
        speeds: relative speeds of ranks, to divide work; default: equal.
        copied: whether several of these ranks may have equal elements, as in tensor-parallel
            groups; the `first` piece represents all.

    Raises:
        InputError: the pieces of these ranks do not add up to full parameters.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        comm: Communicator,
        speeds: Sequence[float] | None = None,
        *,
        copied: bool = False,
    ) -> None:
        self.comm = comm
        self.speeds = tuple(speeds or [1.0] * comm.world)
        # The pieces are kept, so no id can come to mean another tensor.
        self.pieces = {id(piece.parameter): piece for piece in pieces}
        self._copied = copied
        self.stored = self._exchange_stored()
        for name, parts in self.stored.items():
            _check_complete(name, parts)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.pieces

    def is_first(self, piece: Piece) -> bool:
        """Return True if a piece of this rank represents all copies of its elements."""
        return piece.first or not self._copied

    def _exchange_stored(self) -> dict[str, tuple[StoredPart, ...]]:
        """Exchange what all ranks store of each parameter; by name, in the order of ranks and of
        tensor-parallel parts."""
        windows = {piece.name: piece.window for piece in self.pieces.values()}
        places = {
            (name, part): number
            for number, (name, part) in enumerate(
                (name, part) for name, window in windows.items() for part in range(window.parts)
            )
        }
        mine = torch.zeros(len(places), 3, dtype=torch.int64)
        for piece in self.pieces.values():
            row = [piece.start, piece.end, int(self.is_first(piece))]
            mine[places[piece.name, piece.window.part]] = torch.tensor(row)
        own = mine.to(self.comm.device).view(-1)
        table = self.comm.exchanged(own, "exchange of who stores what")
        by_rank = table.view(self.comm.world, len(places), 3).tolist()
        stored: dict[str, list[StoredPart]] = {name: [] for name in windows}
        for rank, rows in enumerate(by_rank):
            for (name, part), number in places.items():
                start, end, first = rows[number]
                window = windows[name].of_member(part)
                if start < end:
                    stored[name].append(StoredPart(rank, window, start, end, bool(first)))
        return {name: tuple(parts) for name, parts in stored.items()}


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

    def is_hidden_matrix(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is a matrix inside a unit, so neither embedding nor head."""
        piece = self.piece(parameter)
        return len(piece.shape) == 2 and piece.name not in self._root and prod(piece.shape) > 0

    def _part_of(self, parameter: nn.Parameter) -> LayoutPart:
        return next(part for part in self.parts if parameter in part)


def _check_complete(name: str, parts: Sequence[StoredPart]) -> None:
    """Check that the first copies of a parameter have each element once."""
    firsts = [part for part in parts if part.first]
    for window in {part.window for part in parts}:
        stored = sorted((p.start, p.end) for p in firsts if p.window == window)
        ends = [0, *(place for interval in stored for place in interval), window.numel]
        if any(a != b for a, b in list(pairwise(ends))[::2]):
            raise InputError(
                f"the ranks do not store the whole of parameter '{name}', each element once",
                code="parameter-not-stored-once",
                why=f"of its {window.numel} elements they have {stored}",
                fix="give the communicator of those ranks that divide the state among them",
            )
