"""Values exchanged by ranks in each step together with losses, at no extra cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch


class LossComposition(NamedTuple):
    """Composition of a rank's losses (`engine.rehearsal.loss_watch`).

    Attributes:
        kind: kind of all losses; 0 if there are several kinds, or losses are not watched.
        new: a kind that no rehearsal has seen, or 0.
        lowest, highest: bounds of the factors of terms, apart from their count.
        miscounts: whether a micro-batch may count otherwise than the rule.
    """

    kind: float = 0.0
    new: float = 0.0
    lowest: torch.Tensor | float = 0.0
    highest: torch.Tensor | float = 0.0
    miscounts: torch.Tensor | float = 0.0


COLUMNS = 5 + len(LossComposition._fields)


@dataclass(frozen=True)
class StepTable:
    """Values from all ranks in a step; each property is indexed by rank.

    `table` has a row for each rank and is on the device; the first access waits for it.
    """

    table: torch.Tensor

    @cached_property
    def _columns(self) -> list[list[float]]:
        return self.table.T.tolist()

    @classmethod
    def of_zeros(cls, world: int) -> StepTable:
        return cls(torch.zeros(world, COLUMNS))

    @staticmethod
    def row(
        device: torch.device,
        notice: float,
        report: float,
        norm: torch.Tensor | float,
        makeup: LossComposition = LossComposition(),  # noqa: B008
    ) -> torch.Tensor:
        """Make a rank's row, without losses (column 0) and their count (column 1).

        The host never waits: `fill_` passes a number with the kernel, while an assignment would
        copy it from memory that is not pinned, and wait for the copy.
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
        """Ranks with a summed loss that is not finite."""
        return [r for r, loss in enumerate(self._columns[0]) if not math.isfinite(loss)]

    @property
    def counts(self) -> list[float]:
        """Number of losses summed by each rank."""
        return self._columns[1]

    @property
    def notices(self) -> list[float]:
        return self._columns[2]

    @property
    def reports(self) -> list[float]:
        return self._columns[3]

    @property
    def own_norms(self) -> list[float]:
        """Norm of each rank's own gradient in the previous step."""
        return self._columns[4]

    @property
    def loss_compositions(self) -> list[LossComposition]:
        return [LossComposition(*own) for own in zip(*self._columns[5:])]
