"""Watch on later steps: detects losses composed unlike the rehearsed losses.

A loss may change during training: a term starts after a warm-up, some batches take another branch,
a denominator differs between micro-batches. So every micro-batch's loss is inspected: the
operations at the end of its graph and the factors of its terms. Ranks share the findings in the
exchange of losses of each step, so nothing waits.

A reduction by an autograd function of the program's own shows no denominator. The rows that it
gives a gradient are those that it counts: their number must stay proportional to the count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpumix.engine.comm.async_read import AsyncRead
from gpumix.engine.comm.step_exchange import LossComposition, StepTable
from gpumix.engine.loss.loss_graph import kind_and_weight_of, observe_unknown_rows

MOST_DOUBTS = 16  # kinds of losses rehearsed after the first rehearsal
MOST_ROW_DOUBTS = 3  # after which rows are by nature not proportional to the count
# Steps after which a rehearsal runs in any case, with a full micro-batch: coupling may need many
# samples, and a term may grow from 0.
REHEARSAL_STEPS = tuple(16**power for power in range(1, 7))
TOLERANCE = 1e-4  # relative, of the factors of terms


@dataclass(frozen=True)
class Doubt:
    """Findings of all ranks in a step.

    Attributes:
        step: its number, counted from 1.
        kinds: kinds of losses that no rehearsal has seen.
        unlike: factors of terms in two micro-batches, apart from counts, if unequal.
        miscounts: whether a micro-batch may count otherwise. A loss was divided by 1, perhaps
            because nothing was counted; or gave gradients to more or fewer rows for its count.
        miscounted: this rank's micro-batches that may.
    """

    step: int
    kinds: Sequence[int]
    unlike: tuple[float, float] | None
    miscounts: bool
    miscounted: Sequence[Any]

    def __bool__(self) -> bool:
        return bool(self.kinds) or self.unlike is not None or self.miscounts


class LossWatch:
    """A rank's watch on losses.

    Attributes:
        by_values: whether counts are read from graphs.
        doubts: doubts read so far, oldest first; equal on all ranks.

    Args:
        known: kinds of losses seen in the rehearsal.
        late: number of steps after which a step's findings are read, equal on all ranks.
    """

    def __init__(
        self, device: torch.device, known: Sequence[int], *, late: int, by_values: bool
    ) -> None:
        self._device = device
        self._known = set(known)
        self._late, self.by_values = late, by_values
        self._told: deque[tuple[int, AsyncRead, list[tuple[Tensor, Any]]]] = deque()
        self._rows_per_count: Tensor | None = None  # of a loss of unknown reduction
        self._row_doubts_left = MOST_ROW_DOUBTS
        self._left = MOST_DOUBTS
        self._doubted: tuple[int, Any] = (0, None)  # a kind, and a micro-batch of it
        self.doubts: deque[Doubt] = deque()
        self._begin()

    @property
    def known(self) -> list[int]:
        """Kinds of losses known to add up."""
        return sorted(self._known)

    def _begin(self) -> None:
        self._kinds: set[int] = set()
        self._ends: tuple[Tensor, Tensor] | None = None  # lowest and highest weight
        self._miscounted: list[tuple[Tensor, Any]] = []  # whether it may be, and the micro-batch

    def see(self, summed: Tensor, count: Tensor, batch: Any) -> None:
        """Inspect the loss of a micro-batch.

        Args:
            summed, count: the objective's result.
        """
        kind, weight = kind_and_weight_of(summed)
        self._kinds.add(kind)
        if kind not in self._known and not self._doubted[0] and self._left:
            self._doubted = kind, batch
        with torch.no_grad():
            counted = torch.as_tensor(count, dtype=torch.float64, device=self._device)
            if weight is not None:
                own = torch.where(counted > 0, weight, math.nan)
                low, high = self._ends or (own, own)
                self._ends = torch.fmin(low, own), torch.fmax(high, own)
            if self.by_values and self._checks_counts:
                self._miscounted.append((counted == 1, batch))
        if self._checks_counts and not self.by_values:
            observe_unknown_rows(summed, lambda rows: self._compare_rows(rows / counted, batch))

    @property
    def _checks_counts(self) -> bool:
        return bool(self._left if self.by_values else self._row_doubts_left)

    def _compare_rows(self, rows_per_count: Tensor, batch: Any) -> None:
        if self._rows_per_count is None:
            self._rows_per_count = rows_per_count
        is_alike = torch.isclose(rows_per_count, self._rows_per_count, rtol=TOLERANCE)
        self._miscounted.append((~is_alike & rows_per_count.isfinite(), batch))

    def take(self) -> LossComposition:
        """Return this rank's findings of the ending step, and reset."""
        [kind] = self._kinds if len(self._kinds) == 1 else (0,)
        new, _ = self._doubted
        self._last_miscounted = self._miscounted
        flags = [flag for flag, _ in self._miscounted]
        miscounts = torch.stack(flags).any() if flags else 0.0
        low, high = self._ends or (math.nan, math.nan)
        told = LossComposition(float(kind), float(new), low, high, miscounts)
        self._begin()
        return told

    def note(self, step: int, table: Tensor) -> None:
        """Record the table of all ranks' findings for a step, counted from 1."""
        self._told.append((step, AsyncRead([table]), self._last_miscounted))

    def read(self, *, all_of_them: bool = False) -> None:
        """Read the findings of steps that are due."""
        while len(self._told) > (0 if all_of_them else self._late):
            step, reading, candidates = self._told.popleft()
            [table] = reading.tensors()
            makeups = StepTable(table).loss_compositions
            kinds = self._new(one.new for one in makeups)
            miscounts = any(one.miscounts for one in makeups) and self._checks_counts
            own = [batch for flag, batch in candidates if flag] if miscounts else []
            if doubt := Doubt(step, kinds, _find_unequal_weights(makeups), miscounts, own):
                self.doubts.append(doubt)

    def kept(self, kind: int) -> Any:
        """Return this rank's micro-batch with an unrehearsed kind of loss, if any."""
        doubted, batch = self._doubted
        return batch if doubted == kind else None

    def accept_kinds(self, kinds: Sequence[int], settled: int = 0) -> None:
        """Mark kinds of losses as adding up; equal on all ranks.

        Args:
            settled: the rehearsed kind; it stays unknown if its losses were 0.
        """
        self._known.update(kinds)
        self._left = max(0, self._left - 1)
        if self._doubted[0] in {*self._known, settled}:
            self._doubted = 0, None
        left = [replace(one, kinds=self._new({*one.kinds} - {settled})) for one in self.doubts]
        self.doubts = deque(filter(None, left))

    def accept_rows(self) -> None:
        """Mark losses as adding up with other numbers of rows for their count; equal on all
        ranks."""
        self._row_doubts_left -= 1

    def _new(self, kinds: Iterable[float]) -> list[int]:
        """Return the unknown kinds."""
        return sorted(set(map(int, kinds)) - {0} - self._known)


def _find_unequal_weights(makeups: Sequence[LossComposition]) -> tuple[float, float] | None:
    """Return the least and greatest weight of ranks with a single kind, if unequal."""
    by_kind: dict[float, list[float]] = {}
    for one in makeups:
        if one.kind:
            by_kind.setdefault(one.kind, []).extend((float(one.lowest), float(one.highest)))
    for own in by_kind.values():
        known = [weight for weight in own if math.isfinite(weight)]
        if known and max(known) - min(known) > TOLERANCE * max(map(abs, known)):
            return min(known), max(known)
    return None
