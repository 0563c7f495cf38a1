"""What ranks tell each other in each step, beside their losses and at no further cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from gpumix.engine.comm import Pending


class Makeup(NamedTuple):
    """How a rank's losses are made (`engine.loss_watch`).

    Attributes:
        kind: of all of them; 0 if they are of several kinds, or nobody looks.
        new: a kind that no rehearsal has seen, or 0.
        lowest, highest: what terms are multiplied with, beside their count.
        by_one: whether a count that is read from a graph is 1.
    """

    kind: float = 0.0
    new: float = 0.0
    lowest: torch.Tensor | float = 0.0
    highest: torch.Tensor | float = 0.0
    by_one: torch.Tensor | float = 0.0


COLUMNS = 5 + len(Makeup._fields)


@dataclass(frozen=True)
class Exchanged:
    """What all ranks told in a step, each property by rank.

    `table` has a row for each; it is on the device, and the first look at it waits for that.
    """

    table: torch.Tensor

    @cached_property
    def _columns(self) -> list[list[float]]:
        return self.table.T.tolist()

    @classmethod
    def nothing(cls, world: int) -> Exchanged:
        return cls(torch.zeros(world, COLUMNS))

    @staticmethod
    def row(
        device: torch.device,
        notice: float,
        report: float,
        norm: torch.Tensor | float,
        makeup: Makeup = Makeup(),  # noqa: B008
    ) -> torch.Tensor:
        """What one rank tells, but for its losses (column 0) and their count (column 1).

        The host waits for nothing: a number of its own goes along with the kernel that writes it,
        where an assignment would copy it from memory that is not pinned, and wait for the copy.
        """
        row = torch.zeros(COLUMNS, dtype=torch.float64, device=device)
        for place, value in enumerate((notice, report, norm, *makeup), 2):
            if isinstance(value, torch.Tensor):
                row[place].copy_(value)
            elif value:
                row[place].fill_(value)
        return row

    @property
    def bad_losses(self) -> list[int]:
        """Ranks whose summed loss is not finite."""
        return [r for r, loss in enumerate(self._columns[0]) if not math.isfinite(loss)]

    @property
    def counts(self) -> list[float]:
        """How many losses each has summed."""
        return self._columns[1]

    @property
    def notices(self) -> list[float]:
        return self._columns[2]

    @property
    def reports(self) -> list[float]:
        return self._columns[3]

    @property
    def own_norms(self) -> list[float]:
        """The norm of what each rank itself had of the gradient in the step before."""
        return self._columns[4]

    @property
    def makeups(self) -> list[Makeup]:
        return [Makeup(*own) for own in zip(*self._columns[5:])]


def scale_of(table: torch.Tensor, exchanged: Pending, scale: torch.Tensor) -> torch.Tensor:
    """What gradients of summed losses times `scale` are multiplied with, to be those of the mean: 0
    where nothing was counted; waits until the table is there."""
    exchanged.wait()
    counted = table[:, 1].sum() * scale
    return torch.where(counted > 0, 1.0 / counted, 0.0).float()
