"""Worker pools fetching chunks in parallel: threads of this process, or separate processes."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Literal

import torch

from gpumix.data.core import sample_rng
from gpumix.data.core.host_limits import keep_freed_memory
from gpumix.data.core.read_policy import (
    IF_SLOW,
    NO_SAMPLE,
    NOTE_BYTES,
    NOTHING_READ,
    BadSamples,
    StuckError,
    read_shared_note,
    share_note_in,
)
from gpumix.data.core.read_policy import (
    notes as thread_notes,
)
from gpumix.data.core.source import Source
from gpumix.data.workers.batch_layout import Batch, BatchLayout
from gpumix.data.workers.fetch import Chunk, FetchResult, fetch_timed
from gpumix.data.workers.fork_server import (
    ForkServer,
    Inbox,
    WorkerProcess,
    make_picklable,
    send_message,
)
from gpumix.data.workers.shared_memory import Arena
from gpumix.hardware.host.environment import use_one_tokenizer_thread
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.schema.errors import MachineError, TrainingError, get_first_line
from gpumix.schema.job.job import MOST_WORKERS as MOST_PINNED

Kind = Literal["threads", "processes"]
Done = Callable[[Chunk, "FetchResult | Exception"], None]
"""Called in some thread once a chunk is fetched, or has failed."""

MOST_WORKERS = 128  # chosen automatically
NOTE_SLOTS = 2 * MOST_PINNED  # workers that leave keep theirs until they have ended
QUEUED_CHUNKS = 1  # chunks queued per process, in addition to the current one
TRIES = 2  # attempts at a chunk whose worker died
LOOK_S = 0.5  # interval between checks for stuck workers
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkTarget:
    """Destination of a chunk's rows: `slot` of the arena as laid out by `layout`, or `target`.
    Without either, the rows are handed over."""

    slot: int | None = None
    layout: BatchLayout | None = None
    target: Batch | None = None


class WorkerPool(ABC):
    """A pool of workers that fetches several chunks at once. Calls must not overlap."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.lost = 0
        """Number of workers that died or got stuck."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Number of further chunks the pool would take now."""

    @abstractmethod
    def begin(self, chunk: Chunk, place: ChunkTarget) -> None:
        """Fetch a chunk; report the result to `done`."""

    @abstractmethod
    def resize(self, workers: int) -> None:
        """Set the number of workers."""

    @abstractmethod
    def look(self) -> None:
        """Replace stuck workers; called now and then by the thread waiting for chunks."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; drop chunks in flight."""


class ThreadWorkerPool(WorkerPool):
    """A pool of threads. A stuck thread cannot be ended: the pool ignores its result and replaces
    it by a new thread. Hence daemon threads; `close` ends them before the interpreter does.

    Args:
        timeout_s: seconds over one chunk after which a thread counts as stuck.
        draws: whether samples are known to draw from generators of this process; see `Bounds`.
    """

    def __init__(
        self,
        source: Source,
        bad_samples: BadSamples,
        done: Done,
        workers: int,
        *,
        timeout_s: float,
        draws: bool = False,
    ) -> None:
        super().__init__(workers)
        self._source, self._bad_samples, self._done = source, bad_samples, done
        self._timeout_s, self._draws = timeout_s, draws
        self._given: SimpleQueue[tuple[Chunk, ChunkTarget] | None] = (
            SimpleQueue()
        )  # None ends a thread
        self._begun = 0  # unfinished chunks
        # Current chunk of each thread, its start time, and the note of the sample being read.
        self._at: dict[threading.Thread, tuple[Chunk, float, list[float]]] = {}
        self._threads: set[threading.Thread] = set()
        self._left_behind = False
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(workers):
            self._hire()

    @property
    def room(self) -> int:
        return max(0, self.workers - self._begun)

    def begin(self, chunk: Chunk, place: ChunkTarget) -> None:
        with self._lock:
            self._begun += 1
        self._given.put((chunk, place))

    def resize(self, workers: int) -> None:
        for _ in range(workers - self.workers):
            self._hire()
        for _ in range(self.workers - workers):
            self._given.put(None)  # queued after the chunks given out
        self.workers = workers

    def look(self) -> None:
        now = time.monotonic()
        with self._lock:
            at = list(self._at.items())
            stuck = [
                (who, chunk, int(notes[0]))
                for who, (chunk, since_s, notes) in at
                if now - since_s > self._timeout_s
            ]
            for who, _, _ in stuck:
                del self._at[who]
                self._threads.discard(who)
                self._left_behind = True
                self._begun -= 1
        for who, chunk, index in stuck:
            sample_rng.end_turn_of_thread(who)
            self.lost += 1
            self._hire()
            told = _describe_samples(chunk, index), self._source.name, self._timeout_s
            _LOG.warning(
                "a thread of the data was stuck at %s of %s, another has its place: it was at it "
                "for more than %g s",
                *told,
            )
            self._done(chunk, self._lost(chunk, index))

    def close(self) -> None:
        self._closed = True
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for _ in threads:
            self._given.put(None)
        for thread in threads:
            # After a thread was left behind, others may wait for a lock it owns.
            patience_s = min(self._timeout_s, threading.TIMEOUT_MAX)
            thread.join(0 if self._left_behind else patience_s)

    # -- inside ------------------------------------------------------------------------------------

    def _hire(self) -> None:
        keep_freed_memory()
        thread = threading.Thread(target=self._work, name="gpumix-loader", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        own = threading.current_thread()
        while (given := self._given.get()) is not None and not self._closed:
            chunk, place = given
            with self._lock:
                self._at[own] = chunk, time.monotonic(), thread_notes.at
            found = self._fetched(chunk, place)
            with self._lock:
                if self._at.pop(own, None) is None:
                    return  # it took too long and was replaced
                self._begun -= 1
            self._done(chunk, found)
        with self._lock:
            self._threads.discard(own)

    def _fetched(self, chunk: Chunk, place: ChunkTarget) -> FetchResult | Exception:
        try:
            with count_as_host_memory(), self._drawing(chunk):
                target = _rows_of(place.target, chunk)
                values, skipped, cost = fetch_timed(self._source, chunk, self._bad_samples, target)
                written = _copy_to_target(values, target)
            values_left = None if written else values
            return FetchResult(cost, skipped, values_left, draws=self._source.draws)
        except Exception as error:
            return error

    @contextmanager
    def _drawing(self, chunk: Chunk) -> Iterator[None]:
        """Seed random draws by row. Generators of the process, if used, are restored afterwards;
        the training thread waits meanwhile: see `Bounds`."""
        everywhere = self._draws or self._source.draws
        kept = sample_rng.preserve_rng_state() if everywhere else nullcontext()
        with kept, sample_rng.use_row_seeds(chunk.seeds.tolist(), everywhere=everywhere):
            yield

    def _lost(self, chunk: Chunk, index: int) -> TrainingError:
        return StuckError(
            f"a thread of the data is stuck at {_describe_samples(chunk, index)} of "
            f"{self._source.name}, as was one before it: it was at it for "
            f"more than {self._timeout_s:g} s",
            code="data-thread-stuck",
            where=f"process {os.getpid()}",
            why="threads cannot be ended, so they are left behind",
            fix=IF_SLOW,
        )


@dataclass
class _WorkerState:
    """A worker process, its unfinished chunks, and the start time of the first."""

    worker: WorkerProcess
    given: deque[tuple[Chunk, ChunkTarget]] = field(default_factory=deque)
    since_s: float = 0.0
    leaving: bool = False
    note_slot: int = 0  # where it notes the sample being read


class ProcessWorkerPool(WorkerPool):
    """A pool of forked processes, and a listener thread in the parent.

    Args:
        timeout_s: seconds over one chunk after which a worker counts as stuck.

    Raises:
        MachineError: the system refuses even a single process.
    """

    def __init__(
        self,
        source: Source,
        bad_samples: BadSamples,
        done: Done,
        workers: int,
        *,
        arena: Arena,
        timeout_s: float,
    ) -> None:
        super().__init__(workers)
        self._source, self._done, self._timeout_s = source, done, timeout_s
        self._notes = notes = mmap.mmap(-1, NOTE_SLOTS * NOTE_BYTES)
        self._nursery = ForkServer(lambda inbox: _work(inbox, source, bad_samples, arena, notes))
        self._hands: dict[Connection, _WorkerState] = {}
        self._tries: dict[tuple[int, int], int] = {}
        self._lock = threading.RLock()
        self._bell, self._ear = connections.Pipe()
        self._closed = False
        self._broken: Exception | None = None
        try:
            self._fill()
        except MachineError:
            self._nursery.close()
            raise
        self._listener = threading.Thread(
            target=self._listen_on, name="gpumix-loader-listener", daemon=True
        )
        self._listener.start()

    @property
    def room(self) -> int:
        with self._lock:
            if self._broken is not None:
                return 1  # for `begin` to report the error
            return sum(max(0, 1 + QUEUED_CHUNKS - len(h.given)) for h in self._staff)

    @property
    def pids(self) -> list[int]:
        return [hand.worker.pid for hand in self._hands.values()]

    @property
    def _staff(self) -> list[_WorkerState]:
        return [hand for hand in self._hands.values() if not hand.leaving]

    def begin(self, chunk: Chunk, place: ChunkTarget) -> None:
        with self._lock:
            if self._broken is None:
                self._give(min(self._staff, key=lambda hand: len(hand.given)), chunk, place)
                return
        self._done(chunk, self._broken)

    def resize(self, workers: int) -> None:
        with self._lock:
            self.workers = workers
            staff = self._staff
            for hand in staff[workers:]:
                hand.leaving = True
            self._fill()
        self._bell.send_bytes(b"!")

    def look(self) -> None:
        """Do nothing: the listener checks."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with suppress(OSError):
            self._bell.send_bytes(b"!")
        if self._listener is not threading.current_thread():  # it may collect the loader
            self._listener.join()
        for hand in self._hands.values():
            hand.worker.close()
        self._hands.clear()
        self._nursery.close()

    # -- inside ------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start the missing workers; accept fewer if the system refuses more."""
        while len(staff := self._staff) < self.workers:
            try:
                self._hire()
            except MachineError as error:
                if not staff:
                    raise
                told = len(staff), self.workers, get_first_line(error)
                _LOG.warning("%d of %d data workers: %s", *told)
                return

    def _hire(self) -> None:
        worker = self._nursery.fork()
        taken = {hand.note_slot for hand in self._hands.values()}
        desk = next(n for n in range(NOTE_SLOTS) if n not in taken)
        self._notes[desk * NOTE_BYTES : (desk + 1) * NOTE_BYTES] = NOTHING_READ
        self._hands[worker.connection] = _WorkerState(worker, note_slot=desk)

    def _give(self, hand: _WorkerState, chunk: Chunk, place: ChunkTarget) -> None:
        if not hand.given:
            hand.since_s = time.monotonic()
        hand.given.append((chunk, place))
        with suppress(OSError):  # it died: the listener will notice
            hand.worker.send((chunk, place.slot, place.layout, hand.note_slot))

    def _listen_on(self) -> None:
        try:
            self._listen()
        except Exception as error:  # such as no new worker: report it to the caller
            with self._lock:
                self._broken = error
                given = [chunk for hand in self._hands.values() for chunk, _ in hand.given]
            for chunk in given:
                self._done(chunk, error)

    def _listen(self) -> None:
        while not self._closed:
            with self._lock:
                waiting = [self._ear, *self._hands]
            for ready in connections.wait(waiting, timeout=LOOK_S):
                if ready is self._ear:
                    self._ear.recv_bytes()
                elif ready in self._hands:
                    self._hear(self._hands[ready])  # type: ignore[index]
            with self._lock:
                self._dismiss()
            self._look_for_stuck()

    def _hear(self, hand: _WorkerState) -> None:
        heard_s = time.thread_time()
        try:
            found: FetchResult | Exception = hand.worker.connection.recv()
        except (OSError, EOFError):
            self._replace_worker(hand, "")
            return
        with self._lock:
            chunk, _ = hand.given.popleft()
            hand.since_s = time.monotonic()
            self._tries.pop((chunk.batch, chunk.start), None)
        if isinstance(found, FetchResult):
            found = replace(found, heard_s=heard_s)
        self._done(chunk, found)

    def _dismiss(self) -> None:
        for hand in [h for h in self._hands.values() if h.leaving and not h.given]:
            del self._hands[hand.worker.connection]
            self._nursery.end(hand.worker)

    def _look_for_stuck(self) -> None:
        now = time.monotonic()
        with self._lock:
            stuck = [
                h for h in self._hands.values() if h.given and now - h.since_s > self._timeout_s
            ]
        for hand in stuck:
            self._replace_worker(hand, f"it was at it for more than {self._timeout_s:g} s")

    def _replace_worker(self, hand: _WorkerState, why: str) -> None:
        """Replace a dead or stuck worker, and give its chunks to the rest of the pool."""
        with self._lock:
            if self._closed:
                return
            connection = hand.worker.connection
            how = self._nursery.end(hand.worker)
            how = why or how
            self.lost += 1
            if not hand.leaving:
                self._hire()  # on failure `_listen_on` reports these chunks, too
                self._tell_of_loss(hand, how)
            del self._hands[connection]
            failed: tuple[Chunk, TrainingError] | None = None
            if hand.given:  # the first was in progress
                chunk = hand.given[0][0]
                key = (chunk.batch, chunk.start)
                self._tries[key] = self._tries.get(key, 0) + 1
                if self._tries[key] >= TRIES:
                    failed = chunk, self._lost(hand, self._at(hand), how)
                    hand.given.popleft()
            for chunk, place in hand.given:
                self._give(min(self._staff, key=lambda h: len(h.given)), chunk, place)
        if failed is not None:
            self._done(*failed)

    def _tell_of_loss(self, hand: _WorkerState, how: str) -> None:
        at = f"at {self._at(hand)}" if hand.given else "at no sample"
        told = hand.worker.pid, at, self._source.name, how
        _LOG.warning("worker %d of the data was lost %s of %s, another has its place: %s", *told)

    def _at(self, hand: _WorkerState) -> str:
        """Describe the sample read by a busy worker."""
        return _describe_samples(
            hand.given[0][0], read_shared_note(self._notes, hand.note_slot * NOTE_BYTES)[0]
        )

    def _lost(self, hand: _WorkerState, at: str, how: str) -> TrainingError:
        killed = "SIGKILL" in how
        return TrainingError(
            f"worker {hand.worker.pid} of the data was lost at {at} of {self._source.name}, as was "
            f"one before it: {how}",
            code="data-worker-lost",
            where=f"process {os.getpid()}",
            why="the system kills what takes too much memory: see `dmesg`" if killed else "",
            fix="look at these samples; fewer workers take less memory: `data: {num_workers: 1}`"
            if killed
            else IF_SLOW,
        )


def _describe_samples(chunk: Chunk, index: int) -> str:
    """Describe the sample being read, or the samples of the chunk if unknown."""
    if index != NO_SAMPLE:
        return f"sample {index}"
    more = ", ..." if len(chunk.indices) > 8 else ""
    return "samples " + ", ".join(map(str, chunk.indices[:8].tolist())) + more


def _work(
    inbox: Inbox,
    source: Source,
    bad_samples: BadSamples,
    arena: Arena,
    notes: mmap.mmap,
) -> None:
    """Serve chunks in a worker process until the connection closes."""
    torch.set_num_threads(1)
    use_one_tokenizer_thread()
    keep_freed_memory()
    sample_rng.clear_cached_draws()
    while True:
        chunk, slot, layout, desk = inbox.receive()
        share_note_in(notes, desk * NOTE_BYTES)
        found: FetchResult | Exception
        try:
            target = None
            if slot is not None and layout is not None:
                target = _rows_of(layout.views(arena.buffer(slot, layout.nbytes)), chunk)
            with sample_rng.use_row_seeds(chunk.seeds.tolist(), everywhere=True):
                values, skipped, cost = fetch_timed(source, chunk, bad_samples, target)
            where = _write_to_arena(values, arena, slot, layout, target)
            found = FetchResult(cost, skipped, *where, draws=source.draws)
        except Exception as error:
            found = make_picklable(error)
        send_message(inbox.connection, found)


def _write_to_arena(
    values: Batch, arena: Arena, slot: int | None, layout: BatchLayout | None, target: Batch | None
) -> tuple[Batch | None, BatchLayout | None]:
    """Write `values` into the arena and return the layout if the parent lacks it; without room,
    return `values` to hand over."""
    if slot is None:
        return values, None
    if layout is None:
        layout = BatchLayout.of(values, len(next(iter(values.values()))))
        if layout.nbytes > arena.slot_bytes:
            return values, None
        target = layout.views(arena.buffer(slot, layout.nbytes))
    return (None, layout) if _copy_to_target(values, target) else (values, None)


def _rows_of(target: Batch | None, chunk: Chunk) -> Batch | None:
    """Return the rows of a chunk within a batch."""
    return None if target is None else {key: value[chunk.rows] for key, value in target.items()}


def _copy_to_target(values: Batch, target: Batch | None) -> bool:
    """Write `values` into `target` where needed; return whether `target` has them."""
    if values is target:
        return True
    if target is None or values.keys() != target.keys():
        return False
    if any(target[k].shape != v.shape or target[k].dtype != v.dtype for k, v in values.items()):
        return False
    for key, value in values.items():
        target[key].copy_(value)
    return True
