"""A prefetched batch: rows fetched, rows missing, and the memory for both.

When a rank's part of a batch changes, a successor (its *heir*) replaces the batch and takes over
the rows fetched or in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from gpumix.data.core.read_policy import Skipped
from gpumix.data.order.sampler import BatchPart
from gpumix.data.workers.batch_layout import Batch, BatchLayout
from gpumix.data.workers.fetch import Chunk
from gpumix.data.workers.shared_memory import Arena


@dataclass(frozen=True)
class RowRun:
    """Rows [start, stop) of a batch, equal to rows of the replaced batch from `old_start` on."""

    start: int
    stop: int
    old_start: int


@dataclass
class PrefetchedBatch:
    """A batch being prefetched. The rows lie in `slot` of the arena as laid out by `layout`, in
    `target`, or in separate `parts`.

    Attributes:
        missing: chunks not fetched yet, by first row.
        begun: row ranges given out to workers or taken over, as stop row by first row.
        placed: whether the memory of the rows is decided.
        skipped: samples that could not be read, by first row of their chunk.
        heir: successor, which takes over fetched rows once all chunks given out are done.
        waits: runs of rows expected from the batch this one replaces.
        again: replaces a batch at which a thread got stuck.
        whole: all rows are fetched; the thread that brings the last chunk assembles the batch.
        done: the assembled batch.
        dropped: no longer wanted, but workers may still write into its memory.
    """

    number: int
    part: BatchPart
    missing: dict[int, Chunk]
    begun: dict[int, int] = field(default_factory=dict)
    placed: bool = False
    layout: BatchLayout | None = None
    slot: int | None = None
    arena: Arena | None = None
    target: Batch | None = None
    parts: dict[int, Batch] = field(default_factory=dict)
    skipped: dict[int, tuple[Skipped, ...]] = field(default_factory=dict)
    successor: PrefetchedBatch | None = None
    waits: tuple[RowRun, ...] = ()
    again: bool = False
    whole: bool = False
    done: Batch | None = None
    error: Exception | None = None
    dropped: bool = False

    @property
    def rows(self) -> int:
        return len(self.part.indices)

    @property
    def complete(self) -> bool:
        return not self.missing and not self.waits

    def give_back(self) -> None:
        """Return the slot to the arena."""
        if self.slot is not None and self.arena is not None:
            self.arena.give_back(self.slot)
        self.slot = self.arena = None

    def drop_unstarted(self) -> None:
        """Drop the chunks not given out yet."""
        self.missing = {s: chunk for s, chunk in self.missing.items() if s in self.begun}

    def joined(self) -> Batch:
        """Return all rows as one batch."""
        if not self.parts:
            there = self._memory()
            assert there is not None, "all of it came somewhere"
            return there
        pieces = [values for _, _, values in self.pieces()]
        return pieces[0] if len(pieces) == 1 else concatenate_batches(pieces)

    def pieces(self) -> Iterator[tuple[int, int, Batch]]:
        """Yield the first row, the stop row and the tensors of each run of fetched rows."""
        if self.done is not None:
            yield 0, self.rows, self.done
            return
        there = self._memory()
        for start, stop in sorted(self.begun.items()):
            values = self.parts.get(start)
            if values is None:
                assert there is not None, "what did not come in parts lies there"
                values = _rows(there, start, stop)
            yield start, stop, values

    def find_runs(self, old: PrefetchedBatch) -> tuple[RowRun, ...]:
        """Return the runs of rows that are fetched or in flight in `old_start`."""
        has = np.zeros(old.rows, dtype=bool)
        for start, stop in [(0, old.rows)] if old.done is not None else old.begun.items():
            has[start:stop] = True
        place = {int(p): row for row, p in enumerate(old.part.positions) if has[row]}
        found = [place.get(int(p), -1) for p in self.part.positions]
        runs: list[RowRun] = []
        for row, at in enumerate(found):
            last = runs[-1] if runs else None
            if at < 0:
                continue
            if last and last.stop == row and last.old_start + row - last.start == at:
                runs[-1] = RowRun(last.start, row + 1, last.old_start)
            else:
                runs.append(RowRun(row, row + 1, at))
        return tuple(runs)

    def take_over(self, old: PrefetchedBatch) -> None:
        """Take over the rows awaited from `old_start`, which has all of them. Runs from a single
        piece stay in the memory of `old_start`."""
        runs, self.waits = self.waits, ()
        pieces = list(old.pieces())
        bad = [one for some in old.skipped.values() for one in some]
        for run in runs:
            end = run.old_start + run.stop - run.start
            own = [
                _rows(values, max(run.old_start - start, 0), min(end, stop) - start)
                for start, stop, values in pieces
                if start < end and run.old_start < stop
            ]
            self.parts[run.start] = own[0] if len(own) == 1 else concatenate_batches(own)
            indices = set(self.part.indices[run.start : run.stop].tolist())
            self.skipped[run.start] = tuple(one for one in bad if one.of in indices)

    def _memory(self) -> Batch | None:
        """Lend out the memory the rows were written into; None if all rows came in parts.

        A lent slot returns to the arena when its tensors are freed.
        """
        if len(self.parts) == len(self.begun):
            self.give_back()
        elif self.slot is not None and self.arena is not None and self.layout is not None:
            lent = self.arena.lend(self.slot, self.layout.nbytes)
            self.target = self.layout.views(lent)
            self.slot = self.arena = None
        return self.target


def _rows(there: Batch, start: int, stop: int) -> Batch:
    return {key: value[start:stop] for key, value in there.items()}


def concatenate_batches(parts: list[Batch]) -> Batch:
    """Concatenate batches along the rows."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
