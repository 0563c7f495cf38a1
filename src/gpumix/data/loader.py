"""Feeds one rank: its share of every global batch, fetched ahead by as many workers as that takes.

The plan's shares decide who reads what, never what is read: the state is one position in the
global order, so shares may change and runs may resume on other hardware without losing a sample.
Who fetches, and how far ahead, is measured and put right while the loader is used.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from gpumix.data import draws
from gpumix.data.copies import Copies, CopyStream
from gpumix.data.course import AS_THEY_COME, NO_INDICES, ByLength, Course, begin_of
from gpumix.data.crew import Kind
from gpumix.data.feed import Feed
from gpumix.data.fetch import Cost, fetch_in_time
from gpumix.data.host import batch_memory_bytes, cores_for
from gpumix.data.layout import Batch
from gpumix.data.nursery import can_fork
from gpumix.data.order import Cursor
from gpumix.data.pace import pace_of
from gpumix.data.reading import AS_USUAL, BadSamples, Reading, Skipped
from gpumix.data.rows import Source
from gpumix.data.samples import as_source
from gpumix.data.streams import Form, StreamSource, is_stream
from gpumix.data.tuning import Bounds, Limit, Setting, Tuner
from gpumix.hardware import runtime
from gpumix.spec.errors import InputError
from gpumix.spec.job import MOST_WORKERS
from gpumix.spec.shares import Shares, share_of

COPIED = (
    "the device is a GPU: batches lie in pinned memory, and each is copied beside the step before "
    "its own; tokens with an attention_mask when their step begins"
)
TOLD = 5  # bad samples that a line is said of, each
LOOK_AT = 8  # batches, twice as many, and so on: after them it is watched whether threads draw
LOOK_S, LOOK_SHARE = 0.01, 0.0025  # that it may take, and of the time so far, if that is more
_LOG = logging.getLogger(__name__)


class Loader(Iterator[Batch]):
    """The endless iterator over one rank's share of the global batches, in the global order.

    Batch s is positions [s*B, (s+1)*B) of the endless sequence of epochs, B the sum of `shares`;
    rank r gets its contiguous part of it, in rank order, or what a plan of several stages says; of
    samples of unlike length those that `data.deal` gives it. Batches are dictionaries of tensors
    with samples in the first dimension; a share of zero gives tensors of no rows.

        with Loader(dataset, [6, 2], rank, device="cuda:0") as loader:
            for step, batch in zip(range(1000), loader):
                ...

    Batches are fetched ahead by threads or by processes that are forked, so that a dataset need not
    be one that can be pickled; a worker that dies or is stuck is replaced, and its samples are
    fetched again. How many there are and how far ahead they fetch is chosen from what samples take
    and what the device takes, in the first steps, and put right later; `setting` says what it is
    now, `reasons` why, `limit` what is short. Workers end when the loader is closed or collected,
    and with this process. An error in the dataset is raised by `next()`, with the loader's place
    unchanged.

    Args:
        dataset: a `Source`, or any map-style dataset whose samples are dictionaries of tensors; or
            a stream of them: an iterable, a function that makes a generator, a generator. That is
            read in its own order; see `data.streams`.
        shares: samples of each global batch per rank, in rank order, zeros are allowed; or a plan.
        rank: whose share to read.
        seed: of the global order; the same on every rank.
        device: where the batches go. To a CUDA device each is copied while the one before it is
            computed; tokens with an `attention_mask` come in pinned memory, for the engine cuts off
            padding before it copies them.
        workers: how many fetch at once, at most 1024; 0: one thread.
        kind: of the workers: threads of this process, for which the dataset must be safe to be read
            by several at once, or processes. One thread reads a stream, however many are wanted.
        prefetch: batches to fetch ahead of the one that is used.
        transform: of a stream's sample, in a worker; what costs time belongs here.
        collate: makes a batch of a list of samples, in a worker; default: samples are stacked.
        bad_samples: what happens when a sample cannot be read: the run stops, or another sample,
            the same in every plan, takes its place; a document's pack does without it (`skipped`
            tells).
        timeout_s: after so long over one part of a batch a worker is stuck, and is replaced. A
            thread cannot be ended: it is left behind, and stops the run where it reads a stream.
        by_length: how samples of unlike length are read, where the dataset knows their lengths.
        cores: of this host, for this rank's data; default: its share of those that there are, by
            how many of its host's samples it reads.

    Attributes:
        skipped: the samples that could not be read so far, and why.

    Raises:
        InputError: the shares or the dataset are unfit; see `share_of` and `SampleSource`.
    """

    def __init__(
        self,
        dataset: Source | Any,
        shares: Shares,
        rank: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        workers: int | Literal["auto"] = "auto",
        kind: Kind | Literal["auto"] = "auto",
        prefetch: int | Literal["auto"] = "auto",
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        bad_samples: BadSamples = "stop",
        timeout_s: float = 300.0,
        by_length: ByLength = AS_THEY_COME,
        cores: float | None = None,
    ) -> None:
        _check(workers, kind, prefetch, bad_samples, timeout_s)
        safe = True if kind == "threads" else None
        self._share = share_of(shares, rank)
        reading = Reading(bad_samples, timeout_s)
        self._source = _source_of(
            dataset, self._share.total, transform, collate, safe, seed, reading
        )
        self._rank = rank
        self._by_length = by_length
        self._cursor = begin_of(self._source, seed, by_length, self._share.total)
        self.course = self._course_of(shares)
        bounds = Bounds(
            cores=0.0 if cores is None else cores,
            processes=can_fork() and not self._source.once,
            threads=self._source.thread_safe or (kind == "threads" and not self._source.in_order),
            memory_bytes=0,
            kind=None if kind == "auto" else kind,
            workers=workers if workers != "auto" else None if self._source.parallel else 1,
            ahead=None if prefetch == "auto" else prefetch,
        )
        self._bounds = bounds.where_it_draws() if self._source.draws else bounds
        pin = pin_device(device)
        self._feed = Feed(
            self._source,
            seed=seed,
            bad_samples=bad_samples,
            pin=pin,
            timeout_s=timeout_s,
        )
        self._copies = None if pin is None else Copies(CopyStream(pin))
        weakref.finalize(self, self._feed.close)
        self._tuner = Tuner(self._bounds_by(shares), self._source.splits)
        self._feed.set(self._tuner.setting)
        self._pace = pace_of(pin)
        self._costs: list[Cost] = []  # that the tuner does not know of
        self._batches = 0  # that were returned
        self._since_s: float | None = None  # by `time.monotonic`: the first one
        self.last_indices = NO_INDICES
        """The dataset's indices of the samples in the batch that was returned last, in order."""
        self.skipped: list[Skipped] = []
        """The samples that could not be read, and those in their places; of the batches that were
        returned."""

    @property
    def global_batch(self) -> int:
        return self._share.total

    @property
    def cursor(self) -> Cursor:
        """The place of the next batch that has not been returned; the same on every rank."""
        return self._cursor

    @property
    def setting(self) -> Setting:
        """How batches are fetched now."""
        return self._feed.setting

    @property
    def ready(self) -> int:
        """Batches that were fetched ahead and lie ready now."""
        return self._feed.ready

    @property
    def lost_workers(self) -> int:
        """Workers that died or were stuck so far; others have taken their places."""
        return self._feed.lost_workers

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """Why: each change with the number of steps before it; and how batches come to a GPU."""
        copied = [] if self._copies is None else [(0, COPIED)]
        return copied + self._tuner.reasons

    @property
    def limit(self) -> Limit:
        """What holds the data back, by the last steps; where cores do, no setting helps."""
        return self._tuner.limit

    def __next__(self) -> Batch:
        if self._unseen and self._draws:
            self._read_anew()  # an evaluation saw it, or another loader
        elif self._looks:
            self._fetch_watched()
        self._pace.asked()
        position = self._cursor.position
        self._fetch_ahead()
        ready = self._feed.is_ready(position)
        # Only once the batch is there does anything change, so that an error or an interrupt while
        # waiting loses nothing.
        batch, indices = self._feed.take(position)
        if self._copies is not None:
            batch = self._copies.take(position, batch)
        self.last_indices = indices
        self._cursor = self._cursor.advanced(self.global_batch)
        self._pace.taken(ready=ready)
        self._tune()
        self._batches += 1
        self._since_s = self._since_s or time.monotonic()
        if not self._only_waiting and not self._looks:
            self._fetch_ahead()
        self._copy_ahead()
        return batch

    def indices(self, step: int) -> np.ndarray:
        """The dataset's indices of this rank's share of global batch `step`, counted from 0."""
        return self.course.indices(step * self.global_batch)

    def replan(self, shares: Shares) -> None:
        """Take new shares, as many ranks or not, from the next batch that has not been returned.
        Workers stay, and so do samples that were fetched ahead and stay this rank's.

        All ranks must call this between the same two steps.

        Raises:
            InputError: the shares are unfit, or add up to another global batch.
        """
        share = share_of(shares, self._rank)
        if share.total != self.global_batch:
            raise InputError(
                f"the new samples per rank add up to {share.total}, not to the global batch of "
                f"{self.global_batch}"
            )
        self._share, self.course = share, self._course_of(shares)
        rows = len(self.course.indices(self._cursor.position))
        bounds = self._bounds_by(shares)
        self._feed.set(self._tuner.replanned(bounds, rows, self._feed.batch_bytes))
        self._feed.recut(self.course.part)
        if self._copies is not None:
            self._copies.forget()
        self._pace.forget()

    def state_dict(self) -> dict[str, int | str]:
        """The place of the next batch that has not been returned; what is fetched ahead of it does
        not count. The same on every rank, so any rank's copy restores any number of them."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to the place in `state`.

        Raises:
            InputError: it belongs to another dataset, seed or version of the order.
        """
        self._cursor = self._cursor.load_state_dict(state)
        self._forget()

    def close(self) -> None:
        """Stop fetching and end all workers."""
        self._feed.close()
        self._forget()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _course_of(self, shares: Shares) -> Course:
        lengths, by_length = self._source.lengths, self._by_length
        return Course(
            self._cursor,
            shares,
            self._rank,
            lengths=lengths,
            by_length=by_length,
            in_order=self._source.in_order,
        )

    def _fetch_ahead(self) -> list[int]:
        """Have the next batches under way, at first one alone, to see what it takes: where they
        are."""
        one = not self._tuner.knows or self._only_waiting
        ahead = 1 if one else self._feed.setting.ahead
        positions = [self._cursor.position + k * self.global_batch for k in range(ahead)]
        for position in positions:
            self._feed.want(position, partial(self.course.part, position))
        return positions

    @property
    def _only_waiting(self) -> bool:
        """Whether samples are read only while `next` waits: nobody else may draw then."""
        return self._draws and self._feed.setting.kind == "threads"

    @property
    def _draws(self) -> bool:
        """Whether samples were seen to draw from generators of the process that reads them."""
        return self._feed.draws or self._source.draws

    @property
    def _unseen(self) -> bool:
        """Whether threads read that would draw from this process's generators without a word."""
        threads = self._feed.setting.kind == "threads"
        return threads and not self._bounds.draws and not self._source.once

    @property
    def _looks(self) -> bool:
        """Whether it is time to watch threads while this one waits: for the first batch, and then
        ever more seldom, for batches may always be there in time."""
        n = self._batches
        return self._unseen and (not n or (n >= LOOK_AT and not n & (n - 1)))

    def _fetch_watched(self) -> None:
        """Have the next batches under way, and wait for the first that is not there, or for a
        moment. If samples are seen to draw, they are read anew."""
        with draws.put_back_if_moved() as drawn:
            late = [
                position for position in self._fetch_ahead() if not self._feed.is_ready(position)
            ]
            if late:
                self._feed.wait(late[0], self._patience_s(late[0]))
        if drawn:
            self._read_anew()

    def _patience_s(self, position: int) -> float:
        """For how long the batch at `position` is watched: all of it where it is waited for."""
        if self._since_s is None or position == self._cursor.position:
            return inf
        return max(LOOK_S, LOOK_SHARE * (time.monotonic() - self._since_s))

    def _read_anew(self) -> None:
        """What is under way, and was read by threads that did not know that samples draw."""
        _LOG.warning(
            "samples of %s draw at random, which was not seen before: those so far drew from the "
            "generators of this process, and will not be the same again; "
            "gpumix.sample_generator() is for that",
            self._source.name,
        )
        self._feed.begin_anew()
        if self._copies is not None:
            self._copies.forget()
        self._know_that_it_draws()

    def _know_that_it_draws(self) -> None:
        self._bounds = self._bounds.where_it_draws()
        bounds = self._tuner.bounds.where_it_draws()
        self._feed.set(self._tuner.drawing(bounds, self._feed.batch_bytes))

    def _copy_ahead(self) -> None:
        """Have the next batch on its way to the device, if it is there."""
        if self._copies is None:
            return
        batch = self._feed.there(self._cursor.position)
        if batch is not None:
            self._copies.begin(self._cursor.position, batch)

    def _forget(self) -> None:
        """What is under way."""
        self._feed.forget()
        if self._copies is not None:
            self._copies.forget()

    def _bounds_by(self, shares: Shares) -> Bounds:
        """What this rank's part of its host is."""
        return replace(
            self._bounds,
            cores=self._bounds.cores or cores_for(shares, self._rank),
            memory_bytes=batch_memory_bytes(shares, self._rank),
        )

    def _tune(self) -> None:
        costs, skipped = self._feed.drain()
        _record(skipped, self.skipped, self._source.name)
        self._costs += costs
        rows, batch_bytes = len(self.last_indices), self._feed.batch_bytes
        if self._draws and not self._unseen and not self._bounds.draws:
            self._know_that_it_draws()
        if not self._tuner.knows:
            self._feed.set(self._tuner.first(self._costs, rows, batch_bytes))
            self._costs = []
        for step in self._pace.told():
            self._feed.set(self._tuner.step(step, self._costs, batch_bytes))
            self._costs = []


def _record(found: Iterable[Skipped], record: list[Skipped], name: str) -> None:
    """Samples of the dataset `name` that could not be read; a line is said of the first."""
    for one in found:
        if len(record) < TOLD:
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
            form=Form(transform, collate),
            seed=seed,
            reading=reading,
        )
    if transform is not None:
        raise InputError(
            "`transform` is for streams, whose samples others must read past",
            fix="do it in the dataset's __getitem__",
        )
    return as_source(dataset, collate, thread_safe=thread_safe, reading=reading)


def _check(
    workers: int | str, kind: str, prefetch: int | str, bad_samples: str, timeout_s: float
) -> None:
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < 1):
        raise InputError(f"prefetch must be 1 or more or 'auto', not {prefetch}")
    if workers != "auto" and (not isinstance(workers, int) or not 0 <= workers <= MOST_WORKERS):
        raise InputError(f"workers must be 0 to {MOST_WORKERS} or 'auto', not {workers}")
    if kind not in ("auto", "threads", "processes"):
        raise InputError(f"kind must be 'auto', 'threads' or 'processes', not {kind!r}")
    if kind == "processes" and not can_fork():
        raise InputError(
            "data workers cannot be processes here",
            why="they are forked, and share memory with this one, which is safe on Linux only",
            fix="leave `kind` out",
        )
    if bad_samples not in ("stop", "skip"):
        raise InputError(f"bad_samples must be 'stop' or 'skip', not {bad_samples!r}")
    if not timeout_s > 0:  # nor is a NaN
        raise InputError(f"timeout_s must be above 0, not {timeout_s}")


def evaluation_batches(
    held_out: Source | Any,
    shares: Shares,
    rank: int,
    *,
    batches: int,
    device: torch.device | str = "cpu",
    reading: Reading = AS_USUAL,
    skipped: list[Skipped] | None = None,
) -> Iterator[tuple[Batch, int]]:
    """This rank's share of the first `batches` global batches of `held_out`, in file order, each
    with the number of samples of the whole.

    Never wraps: fewer samples give fewer batches, and too few for one batch give one short batch,
    cut in the same proportions (a rank's part of it may have no rows). Every rank gets the same
    number of batches.

    Args:
        skipped: takes up this rank's samples that cannot be read, where `reading` skips them; those
            that are in it already, from an evaluation before, no second time.

    Raises:
        InputError: the shares are unfit, or nothing is held out.
    """
    share, source = share_of(shares, rank), as_source(held_out, reading=reading)
    total = min(share.total, len(source))
    if not total:
        raise InputError(
            "there are no held-out samples to evaluate on",
            fix="set data.held_out above 0, or evaluation.every_steps to 0",
        )
    own = [np.arange(rows.start, rows.stop) for rows in share.rows(total)]
    indices, pin = np.concatenate([NO_INDICES, *own]), pin_device(device)
    record = [] if skipped is None else skipped

    def batch_at(first: int) -> Batch:
        batch, found = fetch_in_time(source, first + indices, reading)
        known = set(record)
        _record([one for one in found if one not in known], record, source.name)
        return _pinned(batch, pin)

    firsts = range(0, min(batches, len(source) // total) * total, total)
    return ((batch_at(first), total) for first in firsts)


def pin_device(device: torch.device | str) -> torch.device | None:
    """The GPU whose copies want pinned memory; None for any other device."""
    if not runtime.is_gpu(device) or not runtime.is_available():
        return None
    return runtime.indexed(device)  # now: the thread that pins has another current device


def _pinned(batch: Batch, pin: torch.device | None) -> Batch:
    if pin is None:
        return batch
    with runtime.on_device(pin):
        return {key: value.pin_memory() for key, value in batch.items()}
