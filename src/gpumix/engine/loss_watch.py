"""Whether the losses of later steps are made as those that the rehearsal has seen.

A loss may change while training goes on: a term begins after a warm-up, some batches take another
branch, a number that it divides by differs between micro-batches. So every micro-batch's loss is
looked at: which operations are at the end of its graph, and what its terms are multiplied with.
Ranks tell each other in the exchange of losses that each step has, so nothing waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpumix.engine.exchanged import Exchanged, Makeup
from gpumix.engine.loss_graph import kind_and_weight_of
from gpumix.engine.reading import Reading

MOST_DOUBTS = 16  # kinds of losses that are rehearsed, after the first ones
# Behind so many steps a rehearsal is held in any case, with a whole micro-batch: samples may be
# coupled where they are many, and a term may grow from nothing.
AGAIN = tuple(16**power for power in range(1, 7))
TOLERANCE = 1e-4  # of what terms are multiplied with


@dataclass(frozen=True)
class Doubt:
    """Of one step, what ranks have seen.

    Attributes:
        step: its number, counted from 1.
        kinds: of losses that no rehearsal has seen.
        unlike: what terms were multiplied with in two micro-batches, beside their counts, if that
            was not the same.
        by_one: whether a loss was divided by 1: it may be that a number is taken for 1 at least,
            and there was nothing to count.
        of_one: this rank's micro-batches with such a loss.
    """

    step: int
    kinds: Sequence[int]
    unlike: tuple[float, float] | None
    by_one: bool
    of_one: Sequence[Any]

    def __bool__(self) -> bool:
        return bool(self.kinds) or self.unlike is not None or self.by_one


class LossWatch:
    """What one rank sees of losses.

    Attributes:
        doubts: those that were read, the first one first; the same on all ranks.

    Args:
        known: kinds of losses that the rehearsal has seen.
        late: how many steps may be given before what was told in one is read, the same on all
            ranks.
        by_values: whether counts are read from graphs, and are no numbers of labels.
    """

    def __init__(
        self, device: torch.device, known: Sequence[int], *, late: int, by_values: bool
    ) -> None:
        self._device = device
        self._known = set(known)
        self._late, self._by_values = late, by_values
        self._told: deque[tuple[int, Reading, list[tuple[Tensor, Any]]]] = deque()
        self._left = MOST_DOUBTS
        self._doubted: tuple[int, Any] = (0, None)  # a kind, and a micro-batch of it
        self.doubts: deque[Doubt] = deque()
        self._begin()

    def _begin(self) -> None:
        self._kinds: set[int] = set()
        self._ends: tuple[Tensor, Tensor] | None = None  # lowest and highest weight
        self._ones: list[tuple[Tensor, Any]] = []  # whether a count is 1, and the micro-batch

    def see(self, summed: Tensor, count: Tensor, batch: Any) -> None:
        """
        Args:
            summed, count: what an objective has come to for a micro-batch.
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
            if self._by_values and self._left:
                self._ones.append((counted == 1, batch))

    def take(self) -> Makeup:
        """What this rank tells of the step that ends."""
        [kind] = self._kinds if len(self._kinds) == 1 else (0,)
        new, _ = self._doubted
        self._last_ones = self._ones
        by_one = torch.stack([is_one for is_one, _ in self._ones]).any() if self._ones else 0.0
        low, high = self._ends or (math.nan, math.nan)
        told = Makeup(float(kind), float(new), low, high, by_one)
        self._begin()
        return told

    def note(self, step: int, table: Tensor) -> None:
        """A step, counted from 1, was given to the device; `table` is what all ranks tell in it."""
        self._told.append((step, Reading([table]), self._last_ones))

    def read(self, *, all_of_them: bool = False) -> None:
        """What was told in the steps whose time has come."""
        while len(self._told) > (0 if all_of_them else self._late):
            step, reading, ones = self._told.popleft()
            [table] = reading.tensors()
            makeups = Exchanged(table).makeups
            kinds = self._new(one.new for one in makeups)
            by_one = any(one.by_one for one in makeups) and bool(self._left)
            of_one = [batch for is_one, batch in ones if is_one] if by_one else []
            if doubt := Doubt(step, kinds, _unlike(makeups), by_one, of_one):
                self.doubts.append(doubt)

    def kept(self, kind: int) -> Any:
        """This rank's micro-batch whose loss is of a kind that no rehearsal has seen, if any."""
        doubted, batch = self._doubted
        return batch if doubted == kind else None

    def learn(self, kinds: Sequence[int], settled: int = 0) -> None:
        """The losses of these kinds add up. All ranks learn the same.

        Args:
            settled: a kind that was rehearsed; of losses that were nothing it is not known yet.
        """
        self._known.update(kinds)
        self._left = max(0, self._left - 1)
        if self._doubted[0] in {*self._known, settled}:
            self._doubted = 0, None
        left = [replace(one, kinds=self._new({*one.kinds} - {settled})) for one in self.doubts]
        self.doubts = deque(filter(None, left))

    def _new(self, kinds: Iterable[float]) -> list[int]:
        """Those that nobody knows."""
        return sorted(set(map(int, kinds)) - {0} - self._known)


def _unlike(makeups: Sequence[Makeup]) -> tuple[float, float] | None:
    """Of the ranks whose losses are all of one kind: the least and the greatest weight, if they
    differ."""
    by_kind: dict[float, list[float]] = {}
    for one in makeups:
        if one.kind:
            by_kind.setdefault(one.kind, []).extend((float(one.lowest), float(one.highest)))
    for own in by_kind.values():
        known = [weight for weight in own if math.isfinite(weight)]
        if known and max(known) - min(known) > TOLERANCE * max(map(abs, known)):
            return min(known), max(known)
    return None
