"""Loader of one rank: its share of every global batch, prefetched by as many workers as needed.

The shares of a plan decide which rank reads a sample, never which samples are read. The state is
one position in the global order, so shares may change and runs may resume on other hardware without
losing a sample. Workers and prefetch depth are chosen from measurements, and corrected while the
loader is in use.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal

import numpy as np
import torch

from gpumix.data.core import sample_rng
from gpumix.data.core.host_limits import batch_memory_bytes, get_rank_cores
from gpumix.data.core.read_policy import DEFAULT_READING, BadSamples, Reading, Skipped
from gpumix.data.core.source import Source
from gpumix.data.order.global_order import Cursor
from gpumix.data.order.sampler import (
    DEFAULT_BY_LENGTH,
    NO_INDICES,
    ByLength,
    RankSampler,
    make_start_cursor,
)
from gpumix.data.sources.iterable import StreamProcessing, StreamSource, is_stream
from gpumix.data.sources.map_style import as_source
from gpumix.data.workers.autotune import Bounds, Limit, Tuner
from gpumix.data.workers.batch_layout import Batch
from gpumix.data.workers.device_copy import (
    CopyStream,
    InFlightBatches,
    find_pin_memory_device,
    pin_batch,
)
from gpumix.data.workers.fetch import Cost, fetch_with_timeout
from gpumix.data.workers.fork_server import can_fork
from gpumix.data.workers.prefetcher import Prefetcher, PrefetchSettings
from gpumix.data.workers.step_timing import make_step_clock
from gpumix.data.workers.worker_pool import Kind
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import MOST_WORKERS
from gpumix.schema.plan.batch_shares import Shares, get_batch_share

COPIED = (
    "the device is a GPU: batches lie in pinned memory, and each is copied beside the step before "
    "its own; tokens with an attention_mask when their step begins"
)
LOGGED_BAD_SAMPLES = 5  # bad samples that get a log line each
FIRST_WATCH_BATCHES = 8  # batches (then 16, 32, ...) after which threads are watched for draws
WATCH_S, WATCH_SHARE = 0.01, 0.0025  # limit of a watch, or share of the time so far, if longer
_LOG = logging.getLogger(__name__)


class Loader(Iterator[Batch]):
    """The endless iterator over one rank's share of the global batches, in the global order.

    Batch s is positions [s*B, (s+1)*B) of the endless sequence of epochs, with B the sum of
    `shares`. Rank r gets its contiguous part, in rank order, or the part a plan of several stages
    assigns; samples of different lengths are assigned by `data.order.balance_by_length`. Batches
    are dictionaries of tensors with samples in the first dimension; a share of zero gives tensors
    without rows.

        with Loader(dataset, [6, 2], rank, device="cuda:0") as loader:
            for step, batch in zip(range(1000), loader):
                ...

    Threads or forked processes prefetch batches, so datasets need not be picklable. A worker that
    dies or gets stuck is replaced, and its samples are fetched again. The number of workers and the
    prefetch depth are chosen in the first steps, from the time of samples and of the device, and
    corrected later: `setting` has the current values, `reasons` the explanation, `limit` the
    bottleneck. Workers end when the loader is closed or collected, and with this process. `next()`
    raises errors of the dataset, with the loader's place unchanged.

    Args:
        dataset: a `Source`, or any map-style dataset whose samples are dictionaries of tensors; or
            a stream: an iterable, a generator function or a generator. A stream is read in its own
            order; see `data.sources.iterable`.
        shares: samples of each global batch per rank, in rank order, zeros allowed; or a plan.
        rank: the rank whose share is read.
        seed: seed of the global order; equal on every rank.
        device: destination of batches. A batch for a CUDA device is copied during the previous
            step; tokens with an `attention_mask` come in pinned memory, because the engine trims
            padding before it copies them.
        num_workers: number of workers, at most 1024; 0: one thread.
        kind: threads of this process, for which the dataset must be safe to read concurrently, or
            processes. A stream is read by a single thread, whatever `num_workers` says.
        prefetch: batches fetched ahead of the current one.
        transform: applied to a stream's samples in the workers; expensive work belongs here.
        collate: makes a batch of a list of samples, in a worker; default: stack the samples.
        bad_samples: for a sample that cannot be read: stop the run, or take another sample,
            identical in every plan; a pack leaves the document out (see `skipped`).
        timeout_s: seconds over one part of a batch after which a worker counts as stuck and is
            replaced. A thread cannot be ended: it is left behind, and stops the run if it reads a
            stream.
        by_length: settings for samples of different lengths, where the dataset knows the lengths.
        cores: cores of this host for this rank's data; default: in proportion to the samples it
            reads among the ranks of its host.

    Attributes:
        skipped: samples that could not be read so far, and the reasons.

    Raises:
        InputError: the shares or the dataset are invalid; see `get_batch_share` and `SampleSource`.
    """

    def __init__(
        self,
        dataset: Source | Any,
        shares: Shares,
        rank: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        num_workers: int | Literal["auto"] = "auto",
        kind: Kind | Literal["auto"] = "auto",
        prefetch: int | Literal["auto"] = "auto",
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        bad_samples: BadSamples = "stop",
        timeout_s: float = 300.0,
        by_length: ByLength = DEFAULT_BY_LENGTH,
        cores: float | None = None,
    ) -> None:
        _check(num_workers, kind, prefetch, bad_samples, timeout_s)
        safe = True if kind == "threads" else None
        self._share = get_batch_share(shares, rank)
        reading = Reading(bad_samples, timeout_s)
        self._source = _source_of(
            dataset, self._share.total, transform, collate, safe, seed, reading
        )
        self._rank = rank
        self._by_length = by_length
        self._cursor = make_start_cursor(self._source, seed, by_length, self._share.total)
        self.course = self._make_sampler(shares)
        bounds = Bounds(
            cores=0.0 if cores is None else cores,
            processes=can_fork() and not self._source.once,
            threads=self._source.thread_safe or (kind == "threads" and not self._source.in_order),
            memory_bytes=0,
            kind=None if kind == "auto" else kind,
            workers=num_workers if num_workers != "auto" else None if self._source.parallel else 1,
            ahead=None if prefetch == "auto" else prefetch,
        )
        self._bounds = bounds.with_random_draws() if self._source.draws else bounds
        pin = find_pin_memory_device(device)
        self._feed = Prefetcher(
            self._source,
            seed=seed,
            bad_samples=bad_samples,
            pin=pin,
            timeout_s=timeout_s,
        )
        self._copies = None if pin is None else InFlightBatches(CopyStream(pin))
        weakref.finalize(self, self._feed.close)
        self._tuner = Tuner(self._bounds_by(shares), self._source.splits)
        self._feed.set(self._tuner.setting)
        self._pace = make_step_clock(pin)
        self._costs: list[Cost] = []  # not passed to the tuner yet
        self._batches = 0  # returned so far
        self._since_s: float | None = None  # `time.monotonic` at the first batch
        self.last_indices = NO_INDICES
        """Dataset indices of the samples in the last returned batch, in order."""
        self.skipped: list[Skipped] = []
        """Samples that could not be read, and their replacements, in the batches returned so far.
        """

    @property
    def global_batch(self) -> int:
        return self._share.total

    @property
    def cursor(self) -> Cursor:
        """The position of the next batch to return; equal on every rank."""
        return self._cursor

    @property
    def setting(self) -> PrefetchSettings:
        """The current prefetch settings."""
        return self._feed.setting

    @property
    def ready(self) -> int:
        """Number of prefetched batches that are ready now."""
        return self._feed.ready

    @property
    def lost_workers(self) -> int:
        """Number of workers replaced so far because of death or a hang."""
        return self._feed.lost_workers

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """Reasons for changes of settings, with the number of steps before each, and for the way to
        a GPU."""
        copied = [] if self._copies is None else [(0, COPIED)]
        return copied + self._tuner.reasons

    @property
    def limit(self) -> Limit:
        """The bottleneck of data loading in the last steps; if cores are, no setting helps."""
        return self._tuner.limit

    def __next__(self) -> Batch:
        if self._has_unseen_draws and self._draws:
            self._refetch_with_seeds()  # seen in an evaluation or by another loader
        elif self._looks:
            self._fetch_watched()
        self._pace.asked()
        position = self._cursor.position
        self._fetch_ahead()
        ready = self._feed.is_ready(position)
        # State changes only after the batch is fetched, so an error or an interrupt while waiting
        # loses nothing.
        batch, indices = self._feed.take(position)
        if self._copies is not None:
            batch = self._copies.take(position, batch)
        self.last_indices = indices
        self._cursor = self._cursor.advanced(self.global_batch)
        self._pace.taken(ready=ready)
        self._tune()
        self._batches += 1
        self._since_s = self._since_s or time.monotonic()
        if not self._is_read_on_demand and not self._looks:
            self._fetch_ahead()
        self._copy_ahead()
        return batch

    def indices(self, step: int) -> np.ndarray:
        """Return the dataset indices of this rank's share of global batch `step`, from 0."""
        return self.course.indices(step * self.global_batch)

    def replan(self, shares: Shares) -> None:
        """Apply new shares, for any number of ranks, from the next batch on. Workers stay, as do
        prefetched samples still assigned to this rank.

        All ranks must call this between the same two steps.

        Raises:
            InputError: the shares are invalid, or add up to another global batch.
        """
        share = get_batch_share(shares, self._rank)
        if share.total != self.global_batch:
            raise InputError(
                f"the new samples per rank add up to {share.total}, not to the global batch of "
                f"{self.global_batch}",
                code="shares-not-global-batch",
            )
        self._share, self.course = share, self._make_sampler(shares)
        rows = len(self.course.indices(self._cursor.position))
        bounds = self._bounds_by(shares)
        self._feed.set(self._tuner.replanned(bounds, rows, self._feed.batch_bytes))
        self._feed.recut(self.course.part)
        if self._copies is not None:
            self._copies.forget()
        self._pace.forget()

    def state_dict(self) -> dict[str, int | str]:
        """Return the position of the next batch to return, not counting prefetched batches. The
        state is equal on every rank, so any rank's copy restores any number of ranks."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Move to the position in `state`.

        Raises:
            InputError: the state belongs to another dataset, seed or version of the order.
        """
        self._cursor = self._cursor.load_state_dict(state)
        self._forget()

    def close(self) -> None:
        """Stop fetching and end all workers."""
        self._feed.close()
        self._forget()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_sampler(self, shares: Shares) -> RankSampler:
        lengths, by_length = self._source.lengths, self._by_length
        return RankSampler(
            self._cursor,
            shares,
            self._rank,
            lengths=lengths,
            by_length=by_length,
            in_order=self._source.in_order,
        )

    def _fetch_ahead(self) -> list[int]:
        """Request the next batches, at first a single one to measure the cost; return the
        positions."""
        one = not self._tuner.knows or self._is_read_on_demand
        ahead = 1 if one else self._feed.setting.ahead
        positions = [self._cursor.position + k * self.global_batch for k in range(ahead)]
        for position in positions:
            self._feed.want(position, partial(self.course.part, position))
        return positions

    @property
    def _is_read_on_demand(self) -> bool:
        """True if samples are read only while `next` waits: nobody else may draw meanwhile."""
        return self._draws and self._feed.setting.kind == "threads"

    @property
    def _draws(self) -> bool:
        """True once samples were seen to draw from generators of the process reading them."""
        return self._feed.draws or self._source.draws

    @property
    def _has_unseen_draws(self) -> bool:
        """True if reading threads could draw from the generators of this process unnoticed."""
        threads = self._feed.setting.kind == "threads"
        return threads and not self._bounds.draws and not self._source.once

    @property
    def _looks(self) -> bool:
        """True if threads are due to be watched while `next` waits: for the first batch, and ever
        more rarely later, since batches may always be ready in time."""
        n = self._batches
        return self._has_unseen_draws and (not n or (n >= FIRST_WATCH_BATCHES and not n & (n - 1)))

    def _fetch_watched(self) -> None:
        """Request the next batches, and wait for the first unfinished one, or a moment. Read
        samples again if they were seen to draw."""
        with sample_rng.preserve_and_watch_rng() as drawn:
            late = [
                position for position in self._fetch_ahead() if not self._feed.is_ready(position)
            ]
            if late:
                self._feed.wait(late[0], self._patience_s(late[0]))
        if drawn:
            self._refetch_with_seeds()

    def _patience_s(self, position: int) -> float:
        """Return for how long to watch the batch at `position`: without limit if needed now."""
        if self._since_s is None or position == self._cursor.position:
            return inf
        return max(WATCH_S, WATCH_SHARE * (time.monotonic() - self._since_s))

    def _refetch_with_seeds(self) -> None:
        """Fetch batches again after threads read them unaware of random draws."""
        _LOG.warning(
            "samples of %s draw at random, which was not seen before: those so far drew from the "
            "generators of this process, and will not be the same again; "
            "gpumix.sample_generator() is for that",
            self._source.name,
        )
        self._feed.restart_with_draws()
        if self._copies is not None:
            self._copies.forget()
        self._apply_draw_bounds()

    def _apply_draw_bounds(self) -> None:
        self._bounds = self._bounds.with_random_draws()
        bounds = self._tuner.bounds.with_random_draws()
        self._feed.set(self._tuner.apply_draws(bounds, self._feed.batch_bytes))

    def _copy_ahead(self) -> None:
        """Start the copy of the next batch to the device, if fetched."""
        if self._copies is None:
            return
        batch = self._feed.peek(self._cursor.position)
        if batch is not None:
            self._copies.begin(self._cursor.position, batch)

    def _forget(self) -> None:
        """Drop batches in flight."""
        self._feed.forget()
        if self._copies is not None:
            self._copies.forget()

    def _bounds_by(self, shares: Shares) -> Bounds:
        """Return the bounds for the rank's part of its host."""
        return replace(
            self._bounds,
            cores=self._bounds.cores or get_rank_cores(shares, self._rank),
            memory_bytes=batch_memory_bytes(shares, self._rank),
        )

    def _tune(self) -> None:
        costs, skipped = self._feed.drain()
        _record(skipped, self.skipped, self._source.name)
        self._costs += costs
        rows, batch_bytes = len(self.last_indices), self._feed.batch_bytes
        if self._draws and not self._has_unseen_draws and not self._bounds.draws:
            self._apply_draw_bounds()
        if not self._tuner.knows:
            self._feed.set(self._tuner.first(self._costs, rows, batch_bytes))
            self._costs = []
        for step in self._pace.told():
            self._feed.set(self._tuner.step(step, self._costs, batch_bytes))
            self._costs = []


def _record(found: Iterable[Skipped], record: list[Skipped], name: str) -> None:
    """Record unreadable samples of the dataset `name`, and log the first few."""
    for one in found:
        if len(record) < LOGGED_BAD_SAMPLES:
            instead = f"sample {one.instead} takes its place"
            if one.instead is None:
                instead = "its pack does without it"
            _LOG.warning(
                "sample %d of %s cannot be read, %s: %s", *(one.index, name, instead, one.why)
            )
        record.append(one)


def _source_of(
    dataset: Any,
    global_batch: int,
    transform: Callable[[Any], Any] | None,
    collate: Callable[[list[Any]], Batch] | None,
    thread_safe: bool | None,
    seed: int,
    reading: Reading,
) -> Source:
    if is_stream(dataset):
        name = getattr(dataset, "__name__", type(dataset).__name__)
        return StreamSource(
            dataset,
            name,
            global_batch,
            form=StreamProcessing(transform, collate),
            seed=seed,
            reading=reading,
        )
    if transform is not None:
        raise InputError(
            "`transform` is for streams, whose samples others must read past",
            code="transform-without-stream",
            fix="do it in the dataset's __getitem__",
        )
    return as_source(dataset, collate, thread_safe=thread_safe, reading=reading)


def _check(
    num_workers: int | str, kind: str, prefetch: int | str, bad_samples: str, timeout_s: float
) -> None:
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < 1):
        raise InputError(
            f"prefetch must be 1 or more or 'auto', not {prefetch}", code="prefetch-invalid"
        )
    whole = isinstance(num_workers, int) and 0 <= num_workers <= MOST_WORKERS
    if num_workers != "auto" and not whole:
        raise InputError(
            f"num_workers must be 0 to {MOST_WORKERS} or 'auto', not {num_workers}",
            code="num-workers-invalid",
        )
    if kind not in ("auto", "threads", "processes"):
        raise InputError(
            f"kind must be 'auto', 'threads' or 'processes', not {kind!r}",
            code="worker-kind-invalid",
        )
    if kind == "processes" and not can_fork():
        raise InputError(
            "data workers cannot be processes here",
            code="worker-processes-unavailable",
            why="they are forked, and share memory with this one, which is safe on Linux only",
            fix="leave `kind` out",
        )
    if bad_samples not in ("stop", "skip"):
        raise InputError(
            f"bad_samples must be 'stop' or 'skip', not {bad_samples!r}", code="bad-samples-invalid"
        )
    if not timeout_s > 0:  # rejects NaN, too
        raise InputError(f"timeout_s must be above 0, not {timeout_s}", code="timeout-invalid")


def evaluation_batches(
    held_out: Source | Any,
    shares: Shares,
    rank: int,
    *,
    batches: int,
    device: torch.device | str = "cpu",
    reading: Reading = DEFAULT_READING,
    skipped: list[Skipped] | None = None,
) -> Iterator[tuple[Batch, int]]:
    """Return this rank's share of the first `batches` global batches of `held_out`, in file order,
    each with the number of samples of the whole batch.

    Never wraps: fewer samples give fewer batches, and too few for one batch give one short batch,
    cut in the same proportions (a rank's part of it may have no rows). Every rank gets the same
    number of batches.

    Args:
        skipped: collects this rank's unreadable samples, where `reading` skips them; samples
            already in the list, from an earlier evaluation, are not added again.

    Raises:
        InputError: the shares are invalid, or nothing is held out.
    """
    share, source = get_batch_share(shares, rank), as_source(held_out, reading=reading)
    total = min(share.total, len(source))
    if not total:
        raise InputError(
            "there are no held-out samples to evaluate on",
            code="no-held-out-samples",
            fix="set data.validation_split above 0, or eval_steps to 0",
        )
    own = [np.arange(rows.start, rows.stop) for rows in share.rows(total)]
    indices, pin = np.concatenate([NO_INDICES, *own]), find_pin_memory_device(device)
    record = [] if skipped is None else skipped

    def batch_at(first: int) -> Batch:
        batch, found = fetch_with_timeout(source, first + indices, reading)
        known = set(record)
        _record([one for one in found if one not in known], record, source.name)
        return pin_batch(batch, pin)

    firsts = range(0, min(batches, len(source) // total) * total, total)
    return ((batch_at(first), total) for first in firsts)
