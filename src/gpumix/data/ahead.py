"""One batch that is fetched ahead: what of it is there, and where it lies.

Where a rank's part of a batch changes, another one takes its place, and takes over the rows that
are there or under way: its *heir*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from gpumix.data.arena import Arena
from gpumix.data.course import Part
from gpumix.data.fetch import Chunk
from gpumix.data.layout import Batch, Layout
from gpumix.data.reading import Skipped


@dataclass(frozen=True)
class Run:
    """Rows [start, stop) of a batch, which are those of the one before it from `old` on."""

    start: int
    stop: int
    old: int


@dataclass
class Ahead:
    """A batch under way. Its rows lie in `slot` of the arena as `layout` says, or in `target`, or
    came in parts.

    Attributes:
        missing: chunks that are not there yet, by their first rows.
        begun: the last rows, by the first, of those that were given out, or are taken over.
        placed: whether it is decided where its rows lie.
        skipped: samples that could not be read, by the first rows of their chunks.
        heir: takes over what is there once all that was given out is; `waits`: for that one, before
            it, and for these rows.
        again: it takes the place of one at which a thread was stuck.
        whole: all of it is there; who brought the last of it puts it together, with its memory.
        done: all of it, put together.
        dropped: nobody wants it any more, but somebody may still write into its memory.
    """

    number: int
    part: Part
    missing: dict[int, Chunk]
    begun: dict[int, int] = field(default_factory=dict)
    placed: bool = False
    layout: Layout | None = None
    slot: int | None = None
    arena: Arena | None = None
    target: Batch | None = None
    parts: dict[int, Batch] = field(default_factory=dict)
    skipped: dict[int, tuple[Skipped, ...]] = field(default_factory=dict)
    heir: Ahead | None = None
    waits: tuple[Run, ...] = ()
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
        """Its slot."""
        if self.slot is not None and self.arena is not None:
            self.arena.give_back(self.slot)
        self.slot = self.arena = None

    def only_begun(self) -> None:
        """No more of it is to be given out."""
        self.missing = {s: chunk for s, chunk in self.missing.items() if s in self.begun}

    def joined(self) -> Batch:
        """All of it."""
        if not self.parts:
            there = self._memory()
            assert there is not None, "all of it came somewhere"
            return there
        pieces = [values for _, _, values in self.pieces()]
        return pieces[0] if len(pieces) == 1 else concatenated(pieces)

    def pieces(self) -> Iterator[tuple[int, int, Batch]]:
        """Rows that are there: the first and the last of them, and what they are."""
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

    def runs_in(self, old: Ahead) -> tuple[Run, ...]:
        """The rows that `old` has, or will have, too."""
        has = np.zeros(old.rows, dtype=bool)
        for start, stop in [(0, old.rows)] if old.done is not None else old.begun.items():
            has[start:stop] = True
        place = {int(p): row for row, p in enumerate(old.part.positions) if has[row]}
        found = [place.get(int(p), -1) for p in self.part.positions]
        runs: list[Run] = []
        for row, at in enumerate(found):
            last = runs[-1] if runs else None
            if at < 0:
                continue
            if last is not None and (last.stop, last.old + last.stop - last.start) == (row, at):
                runs[-1] = Run(last.start, row + 1, last.old)
            else:
                runs.append(Run(row, row + 1, at))
        return tuple(runs)

    def take_over(self, old: Ahead) -> None:
        """The rows that it waited for, all of which `old` has; they stay in that one's memory."""
        runs, self.waits = self.waits, ()
        pieces = list(old.pieces())
        bad = [one for some in old.skipped.values() for one in some]
        for run in runs:
            end = run.old + run.stop - run.start
            own = [
                _rows(values, max(run.old - start, 0), min(end, stop) - start)
                for start, stop, values in pieces
                if start < end and run.old < stop
            ]
            self.parts[run.start] = own[0] if len(own) == 1 else concatenated(own)
            indices = set(self.part.indices[run.start : run.stop].tolist())
            self.skipped[run.start] = tuple(one for one in bad if one.of in indices)

    def _memory(self) -> Batch | None:
        """What its rows were written into, which is lent from here on; None if all came in parts.

        A slot then comes back by itself."""
        if len(self.parts) == len(self.begun):
            self.give_back()
        elif self.slot is not None and self.arena is not None and self.layout is not None:
            lent = self.arena.lend(self.slot, self.layout.nbytes)
            self.target = self.layout.views(lent)
            self.slot = self.arena = None
        return self.target


def _rows(there: Batch, start: int, stop: int) -> Batch:
    return {key: value[start:stop] for key, value in there.items()}


def concatenated(parts: list[Batch]) -> Batch:
    """Their rows, one behind the other."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
