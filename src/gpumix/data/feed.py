"""Has batches fetched ahead of who takes them, by a crew; puts them together in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gpumix.data import draws
from gpumix.data.arena import Arena
from gpumix.data.course import NO_INDICES, Part
from gpumix.data.crew import LOOK_S, Crew, Kind, Place, Processes, Threads
from gpumix.data.fetch import Chunk, Cost, Fetched, Skipped
from gpumix.data.layout import Batch, Layout
from gpumix.data.reading import BadSamples
from gpumix.data.rows import Source
from gpumix.hardware.memory import host_memory
from gpumix.spec.errors import MachineError

MOST_AHEAD = 64  # batches
SLOTS = 2 * MOST_AHEAD  # of those ahead, and of as many in use
LARGER = 2  # times what a batch takes, that a slot holds: batches of other lengths fit
WHOLE = 2**31  # samples: a batch is not fetched in parts
UNKNOWN_BYTES = 64 * 2**20  # of a slot, where nothing is known of batches


@dataclass(frozen=True)
class Setting:
    """How batches are fetched.

    Attributes:
        workers: threads or processes.
        ahead: batches before the one that is used.
        chunk: samples that a worker fetches at once.
    """

    kind: Kind = "threads"
    workers: int = 1
    ahead: int = 4
    chunk: int = WHOLE


@dataclass
class _Ahead:
    """A batch under way. Its rows lie in `slot` of the arena as `layout` says, or in `target`, or
    came in parts.

    Attributes:
        missing: chunks that are not there yet, by their first rows; `begun`: that were given out.
        skipped: samples that could not be read, by the first rows of their chunks.
        whole: all of it is there; who brought the last of it puts it together, with its memory.
        done: all of it, put together.
        dropped: nobody wants it any more, but somebody may still write into its memory.
    """

    number: int
    part: Part
    missing: dict[int, Chunk]
    begun: set[int] = field(default_factory=set)
    layout: Layout | None = None
    slot: int | None = None
    arena: Arena | None = None
    target: Batch | None = None
    parts: dict[int, Batch] = field(default_factory=dict)
    skipped: dict[int, tuple[Skipped, ...]] = field(default_factory=dict)
    whole: bool = False
    done: Batch | None = None
    error: Exception | None = None
    dropped: bool = False

    @property
    def rows(self) -> int:
        return len(self.part.indices)

    def give_back(self) -> None:
        """Its slot."""
        if self.slot is not None and self.arena is not None:
            self.arena.give_back(self.slot)
        self.slot = self.arena = None


class Feed:
    """What a loader takes its batches from. All of it may be called from one thread only.

    Args:
        seed: of what samples draw at random.
        pin: the CUDA device whose copies want pinned memory.
        timeout_s: after that long over one chunk a worker process counts as stuck.
    """

    def __init__(
        self,
        source: Source,
        *,
        seed: int = 0,
        bad_samples: BadSamples,
        pin: torch.device | None,
        timeout_s: float,
    ) -> None:
        self._source, self._bad_samples = source, bad_samples
        self._pin, self._timeout_s = pin, timeout_s
        self._key = draws.key_of(f"gpumix samples {seed}")
        self._setting = Setting()
        self._crew: Crew | None = None
        self._lacking: MachineError | None = None  # why there is none
        self._arena: Arena | None = None
        self._changed = threading.Condition()
        self._by_position: dict[int, _Ahead] = {}
        self._by_number: dict[int, _Ahead] = {}
        self._pending: deque[Chunk] = deque()
        self._number = 0
        self._empty: Batch | None = None
        self._costs: list[Cost] = []
        self._skipped: list[Skipped] = []
        self.batch_bytes = 0
        """Of the largest batch so far."""
        self._lost_before = 0

    @property
    def lost_workers(self) -> int:
        """How many died or were stuck."""
        return self._lost_before + (0 if self._crew is None else self._crew.lost)

    @property
    def setting(self) -> Setting:
        return self._setting

    def set(self, setting: Setting) -> None:
        """Fetch in another way from here on; what is under way goes on."""
        before, self._setting = self._setting, setting
        if self._crew is None:
            return
        if before.kind != setting.kind:
            self._dismiss()  # who wants a batch next has the others
        elif before.workers != setting.workers:
            self._crew.resize(setting.workers)
        with self._changed:
            self._dispatch()

    def want(self, position: int, part: Callable[[], Part]) -> None:
        """Have the batch at `position` fetched, if it is not under way."""
        under_way = position in self._by_position
        if self._crew is None and self._lacking is None:
            self._hire()
        elif under_way:
            return
        with self._changed:
            if not under_way:
                self._add(position, part())
            self._dispatch()

    def is_ready(self, position: int) -> bool:
        """Whether `take` would not wait."""
        batch = self._by_position[position]
        return batch.done is not None or batch.error is not None

    def there(self, position: int) -> Batch | None:
        """The batch at `position`, if all of it is there; it can still be taken."""
        batch = self._by_position.get(position)
        return None if batch is None else batch.done

    def take(self, position: int) -> tuple[Batch, np.ndarray]:
        """The batch at `position`, which was wanted, and its samples' indices; waits for it. After
        an error it can be wanted again.

        Raises:
            GpumixError: it cannot be had.
        """
        batch = self._by_position[position]
        with self._changed:
            while batch.done is None and batch.error is None:
                if self._lacking is not None:
                    lacking, self._lacking = self._lacking, None  # who wants one next tries anew
                    raise lacking
                self._changed.wait(LOOK_S)  # not for ever: so an interrupt comes through
                if self._crew is not None:
                    self._crew.look()
        if batch.done is None:
            assert batch.error is not None, "it is done or not"
            self.forget()
            self._dismiss()  # a disk that was away may be back: processes start from what is now
            raise batch.error
        del self._by_position[position]
        self._skipped += [one for start in sorted(batch.skipped) for one in batch.skipped[start]]
        self.batch_bytes = max(self.batch_bytes, sum(t.nbytes for t in batch.done.values()))
        return batch.done, batch.part.indices

    def forget(self) -> None:
        """All that is under way."""
        with self._changed:
            self._pending.clear()
            for batch in self._by_position.values():
                batch.dropped = True
                batch.missing = {s: chunk for s, chunk in batch.missing.items() if s in batch.begun}
                if not batch.missing and not batch.whole:
                    del self._by_number[batch.number]
                    batch.give_back()
            self._by_position.clear()

    def drain(self) -> tuple[list[Cost], list[Skipped]]:
        """What chunks took since the last time, and which samples were skipped in the batches that
        were taken."""
        with self._changed:
            costs, self._costs = self._costs, []
        skipped, self._skipped = self._skipped, []
        return costs, skipped

    def close(self) -> None:
        """End all workers."""
        self.forget()
        self._dismiss()

    # -- inside ------------------------------------------------------------------------------------

    def _hire(self) -> None:
        """A crew. Where none can be had it is `take` that says so: who changes a setting, or looks
        ahead, has a batch in hand that would be lost."""
        try:
            self._crew = self._hired()
        except MachineError as error:
            self._lacking = error

    def _hired(self) -> Crew:
        setting = self._setting
        if setting.kind == "threads":
            return Threads(
                self._source,
                self._bad_samples,
                self._finished,
                setting.workers,
                timeout_s=self._timeout_s,
            )
        layout = self._layout(max((b.rows for b in self._by_position.values()), default=0))
        known = max(self.batch_bytes, 0 if layout is None else layout.nbytes)
        self._arena = Arena(SLOTS, LARGER * known or UNKNOWN_BYTES)
        return Processes(
            self._source,
            self._bad_samples,
            self._finished,
            setting.workers,
            arena=self._arena,
            timeout_s=self._timeout_s,
        )

    def _dismiss(self) -> None:
        """The crew; batches that it did not finish are begun again."""
        crew, self._crew = self._crew, None
        if crew is None:
            return
        crew.close()
        self._lost_before += crew.lost
        with self._changed:
            self._arena = None
            self._pending.clear()
            self._by_number.clear()
            for position, batch in self._by_position.items():
                if batch.done is None:
                    batch.give_back()
                    self._add(position, batch.part)

    def _add(self, position: int, part: Part) -> None:
        self._number += 1
        indices, seeds = part.indices, draws.seeds_of(self._key, part.positions)
        size = self._setting.chunk if self._source.splits else max(1, len(indices))
        starts = range(0, len(indices), size) if len(indices) else (0,)
        chunks = {
            s: Chunk(self._number, s, indices[s : s + size], seeds[s : s + size]) for s in starts
        }
        batch = _Ahead(self._number, part, chunks)
        self._by_position[position] = self._by_number[batch.number] = batch
        self._pending.extend(chunks.values())

    def _dispatch(self) -> None:
        """Give the crew what it takes."""
        while self._pending and self._crew is not None and self._crew.room:
            chunk = self._pending.popleft()
            batch = self._by_number[chunk.batch]
            if chunk.start in batch.missing and not batch.dropped:
                batch.begun.add(chunk.start)
                self._crew.begin(chunk, self._place(batch))

    def _place(self, batch: _Ahead) -> Place:
        """Where rows of a batch go: decided when its first chunk is begun."""
        if len(batch.begun) == 1:
            batch.layout = self._layout(batch.rows)
            if self._arena is not None:
                fits = batch.layout is None or batch.layout.nbytes <= self._arena.slot_bytes
                batch.slot = self._arena.take() if fits else None
                batch.arena = self._arena if batch.slot is not None else None
            elif batch.layout is not None and len(batch.missing) > 1:
                batch.target = self._made(batch.layout)
        return Place(batch.slot, batch.layout, batch.target)

    def _layout(self, rows: int) -> Layout | None:
        """Of a batch of samples that are all of one shape."""
        if not self._source.splits:
            return None
        if self._empty is None:
            with draws.put_back():
                self._empty = self._source.rows(NO_INDICES)
        return Layout.of(self._empty, rows)

    def _made(self, layout: Layout) -> Batch:
        with host_memory():
            pinned = self._pin is not None
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
        return layout.views(buffer)

    def _finished(self, chunk: Chunk, found: Fetched | Exception) -> None:
        """In a thread of the crew."""
        with self._changed:
            batch = self._by_number.get(chunk.batch)
            if batch is None or chunk.start not in batch.missing:
                return
            del batch.missing[chunk.start]
            if isinstance(found, Exception):
                batch.error = batch.error or found
            else:
                self._costs.append(found.cost)
                batch.skipped[chunk.start] = found.skipped
                if found.values is not None:
                    batch.parts[chunk.start] = found.values
                batch.layout = batch.layout or found.layout
            whole = batch.whole = not batch.missing
            if whole:
                del self._by_number[batch.number]
            self._dispatch()
            if batch.error is not None:
                self._changed.notify_all()
        if whole:
            self._finish(batch)

    def _finish(self, batch: _Ahead) -> None:
        """Put a batch together, of which all is there."""
        try:
            done = None if batch.error or batch.dropped else self._assembled(batch)
        except Exception as error:
            batch.error = error
        with self._changed:
            if batch.error or batch.dropped:
                batch.give_back()
            else:
                batch.done = done
            self._changed.notify_all()

    def _assembled(self, batch: _Ahead) -> Batch:
        with ExitStack() as stack:
            if self._pin is not None:
                # Pinning goes through the thread's current device; without this every rank would
                # open a context on device 0.
                stack.enter_context(torch.cuda.device(self._pin))
            stack.enter_context(host_memory())
            return self._pinned(self._joined(batch))

    def _joined(self, batch: _Ahead) -> Batch:
        there = batch.target
        if len(batch.parts) == len(batch.begun):
            batch.give_back()
        elif batch.slot is not None and batch.arena is not None and batch.layout is not None:
            lent = batch.arena.lend(batch.slot, batch.layout.nbytes)
            there = batch.layout.views(lent)
            batch.slot = batch.arena = None  # it comes back by itself
        if not batch.parts:
            assert there is not None, "all of it came somewhere"
            return there
        parts = [
            batch.parts[start] if start in batch.parts else _rows(there, start, stop)
            for start, stop in _spans(batch)
        ]
        return parts[0] if len(parts) == 1 else _concatenated(parts)

    def _pinned(self, batch: Batch) -> Batch:
        if self._pin is None:
            return batch
        return {k: v if v.is_pinned() else v.pin_memory() for k, v in batch.items()}


def _spans(batch: _Ahead) -> list[tuple[int, int]]:
    starts = sorted(batch.begun)
    return list(zip(starts, [*starts[1:], batch.rows]))


def _rows(there: Batch | None, start: int, stop: int) -> Batch:
    assert there is not None, "what did not come in parts lies there"
    return {key: value[start:stop] for key, value in there.items()}


def _concatenated(parts: list[Batch]) -> Batch:
    keys = parts[0].keys()
    columns: dict[str, list[Tensor]] = {key: [part[key] for part in parts] for key in keys}
    return {key: torch.cat(values) for key, values in columns.items()}
