"""Prefetching of batches by a worker pool, and assembly in order."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from gpumix.data.core import sample_rng
from gpumix.data.core.read_policy import BadSamples, Skipped, StuckError
from gpumix.data.core.source import Source
from gpumix.data.order.sampler import NO_INDICES, BatchPart
from gpumix.data.workers.batch_layout import Batch, BatchLayout
from gpumix.data.workers.device_copy import pin_batch
from gpumix.data.workers.fetch import Chunk, Cost, FetchResult
from gpumix.data.workers.prefetched_batch import PrefetchedBatch
from gpumix.data.workers.shared_memory import Arena
from gpumix.data.workers.worker_pool import (
    LOOK_S,
    ChunkTarget,
    Kind,
    ProcessWorkerPool,
    ThreadWorkerPool,
    WorkerPool,
)
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.schema.errors import InputError, MachineError

MOST_AHEAD = 64  # batches
SLOTS = 2 * MOST_AHEAD  # for batches ahead, and as many in use
LARGE_BYTES = 2**20  # of a batch whose memory is reused: new memory costs page faults
SLOT_BATCHES = 2  # size of a slot in batches, so that longer batches fit
WHOLE_BATCH_SAMPLES = 2**31  # samples per chunk: a batch is not fetched in parts
UNKNOWN_BYTES = 64 * 2**20  # of a slot, where the size of batches is unknown


@dataclass(frozen=True)
class PrefetchSettings:
    """Prefetch settings.

    Attributes:
        workers: number of threads or processes.
        ahead: batches fetched ahead of the current one.
        chunk: samples that a worker fetches at once.
    """

    kind: Kind = "threads"
    workers: int = 1
    ahead: int = 4
    chunk: int = WHOLE_BATCH_SAMPLES


class Prefetcher:
    """The source of a loader's prefetched batches. All public calls must come from one thread.

    Args:
        seed: seed of the random draws of samples.
        pin: the CUDA device whose copies need pinned memory.
        timeout_s: seconds over one chunk after which a worker counts as stuck.
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
        self._key = sample_rng.derive_key(f"gpumix samples {seed}")
        self._setting = PrefetchSettings()
        self._crew: WorkerPool | None = None
        self._hirer = 0  # process that owns the crew
        self._lacking: MachineError | None = None  # why no crew could start
        self._arena: Arena | None = None
        self._used: Arena | None = None  # reused memory for batches of threads
        self._changed = threading.Condition()
        self._by_position: dict[int, PrefetchedBatch] = {}
        self._by_number: dict[int, PrefetchedBatch] = {}
        self._pending: deque[Chunk] = deque()
        self._number = 0
        self._empty: Batch | None = None
        self._costs: list[Cost] = []
        self._skipped: list[Skipped] = []
        self.batch_bytes = 0
        """Size of the largest batch so far."""
        self.draws = source.draws
        """True once samples were seen to draw from generators of the process that reads them."""
        self._lost_before = 0

    @property
    def lost_workers(self) -> int:
        """Number of workers that died or got stuck."""
        return self._lost_before + (0 if self._crew is None else self._crew.lost)

    @property
    def setting(self) -> PrefetchSettings:
        return self._setting

    @property
    def ready(self) -> int:
        """Number of complete batches."""
        return sum(batch.done is not None for batch in list(self._by_position.values()))

    def set(self, setting: PrefetchSettings) -> None:
        """Fetch with new settings from here on; work in flight continues."""
        before, self._setting = self._setting, setting
        if self._crew is None:
            return
        if before.kind != setting.kind:
            self._dismiss()  # the next `want` starts the new crew
        elif before.workers != setting.workers:
            self._crew.resize(setting.workers)
        with self._changed:
            self._dispatch()

    def want(self, position: int, part: Callable[[], BatchPart]) -> None:
        """Fetch the batch at `position`, unless in flight already.

        Raises:
            InputError: the crew belongs to the process from which this one was forked.
        """
        if self._is_forked:
            raise InputError(
                "this loader is one of the process that this one was forked from, and its workers "
                "are",
                code="loader-in-forked-process",
                where=f"process {os.getpid()}",
                fix="make a loader in the process that reads",
            )
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
        """Return whether `take` would not wait."""
        batch = self._by_position[position]
        return batch.done is not None or batch.error is not None

    def peek(self, position: int) -> Batch | None:
        """Return the batch at `position` if complete, else None, without taking the batch."""
        batch = self._by_position.get(position)
        return None if batch is None else batch.done

    def wait(self, position: int, patience_s: float = inf) -> None:
        """Wait until the requested batch at `position` is complete or has failed, at most
        `patience_s` seconds."""
        until = time.monotonic() + patience_s
        with self._changed:
            while not self.is_ready(position) and (left_s := until - time.monotonic()) > 0:
                if self._lacking is not None:
                    lacking, self._lacking = self._lacking, None  # the next `want` tries again
                    raise lacking
                # With a timeout, so an interrupt gets through.
                self._changed.wait(min(LOOK_S, left_s))
                if self._crew is not None:
                    self._crew.look()

    def take(self, position: int) -> tuple[Batch, np.ndarray]:
        """Wait for the requested batch at `position`; return it and its samples' indices. After an
        error the batch can be requested again.

        Raises:
            GpumixError: the batch could not be fetched.
        """
        self.wait(position)
        batch = self._by_position[position]
        if batch.done is None:
            assert batch.error is not None, "it is done or not"
            self.forget()
            self._dismiss()  # a lost disk may be back: new processes see the current state
            raise batch.error
        del self._by_position[position]
        self._skipped += [one for start in sorted(batch.skipped) for one in batch.skipped[start]]
        self.batch_bytes = max(self.batch_bytes, sum(t.nbytes for t in batch.done.values()))
        return batch.done, batch.part.indices

    def forget(self) -> None:
        """Drop all batches, fetched or in flight."""
        if self._is_forked:
            return  # a parent's thread may own the lock, which is never released here
        with self._changed:
            self._pending.clear()
            for batch in self._by_position.values():
                self._drop(batch)
            self._by_position.clear()

    def restart_with_draws(self) -> None:
        """Drop batches fetched by workers unaware of draws from generators of the process."""
        self.draws = True
        self._skipped.clear()
        self.forget()
        self._dismiss()

    def recut(self, part_at: Callable[[int], BatchPart]) -> None:
        """Cut batches in flight again, by this rank's new part at each position. Keep all rows,
        fetched or in flight, staying on this rank."""
        with self._changed:
            whole = []
            for position, batch in list(self._by_position.items()):
                part = part_at(position)
                if batch.error is None and np.array_equal(part.positions, batch.part.positions):
                    continue
                keeps = self._source.splits and batch.error is None
                heir = self._add(position, part, batch if keeps else None)
                if self._link_successor(batch, heir) is not None:
                    whole.append(heir)
            self._dispatch()
        for heir in whole:
            self._finish(heir)
        self._outgrow()

    def drain(self) -> tuple[list[Cost], list[Skipped]]:
        """Return the costs of chunks since the last call, and the skipped samples of batches
        taken."""
        with self._changed:
            costs, self._costs = self._costs, []
        skipped, self._skipped = self._skipped, []
        return costs, skipped

    def close(self) -> None:
        """End all workers; in a process forked from the owner, leave them alone."""
        if not self._is_forked:
            self.forget()
            self._dismiss()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _is_forked(self) -> bool:
        """True in a process forked from the crew's owner."""
        return self._crew is not None and self._hirer != os.getpid()

    def _hire(self) -> None:
        """Start a crew. A failure is raised by `wait`, not here: callers that change settings or
        look ahead have a batch in hand that would be lost."""
        try:
            self._crew, self._hirer = self._make_pool(), os.getpid()
        except MachineError as error:
            self._lacking = error

    def _make_pool(self) -> WorkerPool:
        setting = self._setting
        if setting.kind == "threads":
            return ThreadWorkerPool(
                self._source,
                self._bad_samples,
                self._finished,
                setting.workers,
                timeout_s=self._timeout_s,
                draws=self.draws,
            )
        layout = self._layout(max((b.rows for b in self._by_position.values()), default=0))
        known = max(self.batch_bytes, 0 if layout is None else layout.nbytes)
        self._arena = Arena(SLOTS, SLOT_BATCHES * known or UNKNOWN_BYTES)
        return ProcessWorkerPool(
            self._source,
            self._bad_samples,
            self._finished,
            setting.workers,
            arena=self._arena,
            timeout_s=self._timeout_s,
        )

    def _dismiss(self) -> None:
        """End the crew; start its unfinished batches again."""
        crew, self._crew = self._crew, None
        if crew is None:
            return
        crew.close()
        self._lost_before += crew.lost
        with self._changed:
            self._arena = self._used = None
            self._pending.clear()
            self._by_number.clear()
            for position, batch in self._by_position.items():
                if batch.done is None:
                    batch.give_back()
                    self._add(position, batch.part)

    def _add(
        self, position: int, part: BatchPart, before: PrefetchedBatch | None = None
    ) -> PrefetchedBatch:
        """Start a batch, which takes over rows of the batch `before`."""
        self._number += 1
        batch = PrefetchedBatch(self._number, part, {})
        batch.waits = () if before is None else batch.find_runs(before)
        batch.begun = {run.start: run.stop for run in batch.waits}
        batch.missing = self._chunks(batch)
        self._by_position[position] = self._by_number[batch.number] = batch
        self._pending.extend(batch.missing.values())
        return batch

    def _chunks(self, batch: PrefetchedBatch) -> dict[int, Chunk]:
        """Return the chunks of rows not taken over, by first row."""
        indices, seeds = (
            batch.part.indices,
            sample_rng.derive_seeds(self._key, batch.part.positions),
        )
        size = self._setting.chunk if self._source.splits else max(1, len(indices))
        taken = sorted(batch.begun.items())
        gaps = zip([0, *(stop for _, stop in taken)], [*(s for s, _ in taken), len(indices)])
        spans = [(s, min(s + size, end)) for first, end in gaps for s in range(first, end, size)]
        if not len(indices):
            spans = [(0, 0)]  # an empty chunk gives shapes and dtypes
        return {s: Chunk(batch.number, s, indices[s:e], seeds[s:e]) for s, e in spans}

    def _drop(self, batch: PrefetchedBatch) -> None:
        batch.dropped, batch.waits = True, ()
        batch.drop_unstarted()
        if not batch.missing and not batch.whole:
            del self._by_number[batch.number]
            batch.give_back()

    def _link_successor(
        self, old: PrefetchedBatch, heir: PrefetchedBatch
    ) -> PrefetchedBatch | None:
        """Hand over rows of `old` now if fetched, otherwise once all rows in flight are. Return the
        heir if complete by now."""
        if not heir.waits:
            self._drop(old)
            return None
        old.successor = heir
        if old.done is not None:
            return self._hand_over(old)
        old.drop_unstarted()
        if old.whole or not old.complete:
            return None  # the thread that brings the last chunk hands over
        del self._by_number[old.number]
        return self._hand_over(old)

    def _hand_over(self, old: PrefetchedBatch) -> PrefetchedBatch | None:
        """Hand the rows of `old` to its heir. Return the heir if complete by now."""
        heir = old.successor
        assert heir is not None, "it has one"
        if heir.dropped:
            old.give_back()
            return None
        if old.error is None:
            heir.take_over(old)
        else:  # the heir may have an heir itself
            heir.error, heir.waits = heir.error or old.error, ()
            old.give_back()
        if not heir.complete:
            return None
        heir.whole = True
        del self._by_number[heir.number]
        return heir

    def _outgrow(self) -> None:
        """Restart processes with larger slots if batches have outgrown the current slots."""
        arena, rows = self._arena, [batch.rows for batch in self._by_position.values()]
        layout = self._layout(max(rows, default=0))
        if arena is not None and layout is not None and layout.nbytes > arena.slot_bytes:
            self._dismiss()

    def _dispatch(self) -> None:
        """Give chunks to the crew while it has room."""
        while self._pending and self._crew is not None and self._crew.room:
            chunk = self._pending.popleft()
            batch = self._by_number.get(chunk.batch)
            if batch is not None and chunk.start in batch.missing and not batch.dropped:
                batch.begun[chunk.start] = chunk.rows.stop
                self._crew.begin(chunk, self._place(batch))

    def _place(self, batch: PrefetchedBatch) -> ChunkTarget:
        """Return the destination of a batch's rows, decided when its first chunk is given out."""
        if not batch.placed:
            batch.placed = True
            batch.layout = self._layout(batch.rows)
            if self._arena is not None:
                fits = batch.layout is None or batch.layout.nbytes <= self._arena.slot_bytes
                batch.slot = self._arena.take() if fits else None
                batch.arena = self._arena if batch.slot is not None else None
            elif batch.layout is not None and self._is_worth_it(batch, batch.layout):
                batch.target = self._made(batch.layout)
        return ChunkTarget(batch.slot, batch.layout, batch.target)

    def _layout(self, rows: int) -> BatchLayout | None:
        """Return the layout of a batch of `rows` equally shaped samples; None if batches cannot be
        split."""
        if not self._source.splits:
            return None
        if self._empty is None:
            with sample_rng.preserve_rng_state():
                self._empty = self._source.rows(NO_INDICES)
        return BatchLayout.of(self._empty, rows)

    def _is_worth_it(self, batch: PrefetchedBatch, layout: BatchLayout) -> bool:
        """Return whether threads should write rows directly into the memory of the batch."""
        spares = self._source.writes and layout.nbytes >= LARGE_BYTES
        return spares or len(batch.missing) > 1

    def _made(self, layout: BatchLayout) -> Batch:
        """Allocate memory for a batch; torch reuses pinned memory by itself."""
        pinned = self._pin is not None
        if not pinned and layout.nbytes >= LARGE_BYTES:
            lent = self._lent(layout.nbytes)
            if lent is not None:
                return layout.views(lent)
        with count_as_host_memory():
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
        return layout.views(buffer)

    def _lent(self, nbytes: int) -> Tensor | None:
        """Return reusable memory, which returns by itself when freed; None if unavailable."""
        if self._used is None or self._used.slot_bytes < nbytes:
            try:
                self._used = Arena(SLOTS, nbytes)
            except MachineError:
                return None
        slot = self._used.take()
        return None if slot is None else self._used.lend(slot, nbytes)

    def _finished(self, chunk: Chunk, found: FetchResult | Exception) -> None:
        """Accept the result of a chunk; called in a thread of the crew."""
        with self._changed:
            batch = self._by_number.get(chunk.batch)
            if batch is None or chunk.start not in batch.missing:
                return
            del batch.missing[chunk.start]
            if isinstance(found, StuckError) and self._begin_again(batch):
                return
            if isinstance(found, Exception):
                batch.error = batch.error or found
            else:
                batch.skipped[chunk.start] = found.skipped
                self.draws |= found.draws
                if found.values is not None:
                    batch.parts[chunk.start] = found.values
                batch.layout = batch.layout or found.layout
            whole = batch.whole = batch.complete
            if whole:
                del self._by_number[batch.number]
            self._dispatch()
            if isinstance(found, FetchResult):
                self._costs.append(_add_handover(found))
            if batch.error is not None:
                self._changed.notify_all()
        if whole:
            self._finish(batch)

    def _begin_again(self, batch: PrefetchedBatch) -> bool:
        """Fetch a batch again, once, after a thread got stuck, since the thread may still write
        into the old memory. Return False if the batch is dropped or exchanges rows with another, or
        for a stream, which continues after the samples already read."""
        passes_on = batch.waits or batch.successor is not None or batch.dropped
        if batch.again or passes_on or self._source.in_order:
            return False
        del self._by_number[batch.number]
        position = next(at for at, one in self._by_position.items() if one is batch)
        self._add(position, batch.part).again = True
        self._dispatch()
        return True

    def _finish(self, batch: PrefetchedBatch) -> None:
        """Assemble a batch with all rows fetched, or hand the rows over."""
        done = heir = None
        try:
            if not (batch.error or batch.dropped or batch.successor):
                with count_as_host_memory():
                    done = pin_batch(batch.joined(), self._pin)
        except Exception as error:
            batch.error = error
        with self._changed:
            batch.done = done
            if batch.successor is not None:
                heir = self._hand_over(batch)
            elif batch.error or batch.dropped:
                batch.give_back()
            self._changed.notify_all()
        if heir is not None:
            self._finish(heir)


def _add_handover(found: FetchResult) -> Cost:
    """Return the cost of a chunk, including the handover, which ends here."""
    if found.heard_s is None:
        return found.cost
    return replace(found.cost, handed_s=time.thread_time() - found.heard_s)
