"""Streams as sources: iterable datasets, streamed `datasets`, generator functions, generators.

A stream has its own order and no access by number, so each worker reads all samples before its own
and drops them; expensive work belongs in `transform`, which is applied only to a worker's own
samples. A stream of several shards has as many *lanes* as divide a global batch, and as many parts.
Rows of a batch belong to lanes, and a worker opens only the lanes of its rows. A lane reads its own
part, then the parts of all other lanes: parts may differ in size, and no sample repeats in a lane
before all others were read.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, MutableMapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gpumix.data.core import sample_rng
from gpumix.data.core.read_policy import (
    DEFAULT_READING,
    Reading,
    Skipped,
    note_sample_begin,
    note_sample_end,
    record_skipped_part,
)
from gpumix.data.core.source import InMemorySource, Source, SourceSlice, hash_parts, sort_by_key
from gpumix.data.sources.map_style import Collate, SampleStacker, call_collate
from gpumix.data.workers.batch_layout import Batch
from gpumix.data.workers.fetch import TRIES, BrokenStreamError, fetch_with_timeout, find_readable
from gpumix.schema.errors import GpumixError, InputError, format_in_one_line
from gpumix.schema.units import format_count

Transform = Callable[[Any], Any]
_LEAVES = frozenset((int, float, bool, str, bytes))
MANY_SHARDS = 10  # per lane: one more or less matters little
ENDLESS_SAMPLES = 2**60  # samples: their number is unknown, and passes follow each other


@dataclass(frozen=True)
class StreamPack:
    """A sample made from several samples of a stream.

    Attributes:
        skipped: unreadable samples since the previous pack.
    """

    values: dict[str, Tensor]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class StreamProcessing:
    """Processing of a stream's samples.

    Attributes:
        transform: applied by a worker to each of its own samples.
        collate: makes a batch of samples; None: stack them.
        repack: makes packs from the samples of a pass through a part, given the number of parts and
            (pass, part); run by all readers of the lane.
        specimen: makes a batch of a given size from the first sample, as costly in time and memory
            as any; None: all samples are alike.
        mark: changes with the samples.
    """

    transform: Transform | None = None
    collate: Collate | None = None
    repack: Callable[[Iterator[Any], int, tuple[int, int]], Iterator[StreamPack]] | None = None
    specimen: Callable[[Any, int], Batch] | None = None
    mark: str = ""


UNPROCESSED = StreamProcessing()


class StreamSource(Source):
    """The samples of a stream, by position; the stream restarts when it ends.

    Args:
        stream: an iterable, an iterable of `datasets`, a function that makes an iterator (given the
            number of the pass, if it needs an argument or takes `epoch` first), or an iterator,
            which can be read once.
        global_batch: samples of a step over all ranks: lanes divide it.
        form: processing of the samples.
        passed_over: global batches left out at the beginning of each pass.
        seed: seed of random draws of the stream itself, such as the order of its files.
        reading: how long to wait for the first samples.

    Raises:
        InputError: the stream is empty, or gives batches or samples that do not fit together.
        TrainingError: its first sample cannot be read.
    """

    in_order = True
    _first: Any
    _empty: Batch

    def __init__(
        self,
        stream: Any,
        name: str,
        global_batch: int,
        *,
        form: StreamProcessing = UNPROCESSED,
        passed_over: int = 0,
        seed: int = 0,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        if isinstance(stream, DataLoader):
            raise InputError(
                "a DataLoader makes batches of its own, and these are no samples",
                code="stream-gives-batches",
                where=name,
                fix="give its dataset; its `collate_fn` is Loader(collate=...)",
            )
        self.name = name
        self._reading = reading
        self._seed = seed
        self._key = sample_rng.derive_key(f"gpumix stream {seed}")
        self._draws = self._stream_draws = False
        self.once = isinstance(stream, Iterator)
        self.parallel = form.transform is not None and not self.once
        self.splits = form.collate is None
        self._stream, self._form = stream, form
        self._lanes = _lanes_of(stream, global_batch)
        self._of_lane = global_batch // self._lanes
        self._passed_over = passed_over * self._of_lane  # samples per lane
        self._open: dict[int, _Lane] = {}
        self._opener = os.getpid()
        self._stack: SampleStacker | None = None
        self._most = 1  # samples requested at once so far
        find_readable(self._learn, 1 + TRIES, name, reading)
        if self._stream_draws and not self.once:
            self._open = {}  # opened before its draws were known

    @property
    def draws(self) -> bool:
        return self._draws

    @property
    def fingerprint(self) -> str:
        shapes = [(k, tuple(v.shape[1:]), str(v.dtype)) for k, v in sort_by_key(self._empty)]
        more = [part for part in (self._passed_over, self._form.mark) if part]
        return hash_parts(self.name, "a stream", self._lanes, self._of_lane, shapes, *more)

    def __len__(self) -> int:
        return ENDLESS_SAMPLES

    def rows(self, indices: np.ndarray) -> Batch:
        if not len(indices):
            return self._empty
        self._most = max(self._most, len(indices))
        samples = [self._sample(row, position) for row, position in enumerate(indices.tolist())]
        return self._batch(indices, samples)

    def specimen(self, indices: np.ndarray) -> Batch:
        """Repeat the first sample, without reading."""
        if self._form.specimen is not None:
            return self._form.specimen(self._first, len(indices))
        return self._batch(np.zeros_like(indices), [self._first] * len(indices))

    def split(self, batches: int, *, read: bool) -> tuple[Source, Source]:
        """Return (the rest, the first global batches of each pass). The number of samples is
        unknown, so no fraction can be held out.

        Args:
            read: whether held-out samples will be requested. If so, they are read once, now: later
                a thread reads the rest, and going back would mean opening the stream again.
        """
        if not batches:
            return self, SourceSlice(self, 0, 0)
        rest = StreamSource(
            self._stream,
            self.name,
            self._lanes * self._of_lane,
            form=self._form,
            passed_over=batches,
            seed=self._seed,
            reading=self._reading,
        )
        if not read:
            return rest, SourceSlice(self, 0, 0)
        wanted = np.arange(batches * self._lanes * self._of_lane)
        return rest, InMemorySource(self.name, *fetch_with_timeout(self, wanted, self._reading))

    def _learn(self, positions: np.ndarray) -> None:
        """Learn keys, shapes, dtypes and random draws from one sample."""
        position = int(positions[0])
        with sample_rng.watch_draws() as drawn:
            self._read_sample(position)
        self._stream_draws = bool(drawn)
        with sample_rng.watch_draws() as drawn_later:
            self._first = self._sample(0, position)
            if self._form.collate is None:
                self._stack = SampleStacker(self.name, self._first, position)
                self._empty = self._stack.empty
            else:
                alone = self._batch(positions, [self._first])
                self._empty = {key: value[:0] for key, value in alone.items()}
        self._draws = drawn.of_process or drawn_later.of_process

    def _batch(self, indices: np.ndarray, samples: list[Any]) -> Batch:
        if self._form.collate is not None:
            return call_collate(self._form.collate, samples, self.name)
        assert self._stack is not None, "there is one or the other"
        return self._stack.of(indices, samples)

    def _sample(self, row: int, position: int) -> Any:
        sample = self._read_sample(position)
        if isinstance(sample, StreamPack):
            for one in sample.skipped:
                record_skipped_part(row, one)
            sample = sample.values
        if self._form.transform is not None or self._form.collate is not None:
            sample = _copied(sample)  # the lane may return its copy again
        if self._form.transform is None:
            return sample
        sample_rng.seed_row(row)
        return self._form.transform(sample)

    def _read_sample(self, position: int) -> Any:
        if os.getpid() != self._opener:  # the parent continues to read its files
            self._open, self._opener = {}, os.getpid()
        step, row = divmod(position, self._lanes * self._of_lane)
        lane, place = divmod(row, self._of_lane)
        if lane not in self._open:
            self._open[lane] = _Lane(
                lambda epoch: self._begun(choose_part(lane, epoch, self._lanes), epoch),
                self.name,
                parts=self._lanes,
                once=self.once,
                passed_over=self._passed_over,
                before=partial(self._before, sample_rng.derive_seed(self._key, lane)),
            )
        return self._open[lane].at(step * self._of_lane + place, kept=self._most + TRIES)

    def _before(self, key: int, place: int) -> None:
        """Seed the draws of a lane before it reads the sample at `place`."""
        if self._stream_draws:
            sample_rng.seed_draws(sample_rng.derive_seed(key, place))

    def _begun(self, part: int, epoch: int) -> Iterator[Any]:
        """Open a pass through a part, without held-out samples."""
        given = self._given(part, epoch)
        if self._form.repack is not None:
            given = self._form.repack(given, self._lanes, (epoch, part))
        return islice(given, self._passed_over, None)

    def _given(self, part: int, epoch: int) -> Iterator[Any]:
        """Open the stream for a pass through a part."""
        stream = self._stream
        if self._lanes > 1:
            stream = stream.shard(num_shards=self._lanes, index=part)
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        if hasattr(stream, "__iter__"):
            return iter(stream)
        return iter(stream(epoch) if _takes_epoch(stream) else stream())


class _Lane:
    """A forward reader of the parts of a stream, pass after pass, restarted if necessary. It keeps
    the last samples, since after a bad sample the whole batch is requested again.

    Args:
        begin: opens a pass by its number.
        parts: number of parts, and limit of consecutive empty passes.
        once: whether only one pass is possible.
        passed_over: samples left out at the beginning of each pass.
        before: called with the place of each sample before it is read.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterator[Any]],
        name: str,
        *,
        parts: int,
        once: bool,
        passed_over: int,
        before: Callable[[int], None],
    ) -> None:
        self._begin, self._name, self._once = begin, name, once
        self._parts, self._passed_over = parts, passed_over
        self._before = before
        self._kept: dict[int, Any] = {}
        self._restart()

    def _restart(self) -> None:
        self._before(0)  # opening a pass may draw
        self._passes = self._begin(0)
        self._broken: Exception | None = None
        self._epoch, self._next, self._of_pass, self._bare = 0, 0, 0, 0

    def at(self, place: int, *, kept: int) -> Any:
        """Return the sample at `place` in the endless sequence of passes; keep the last `kept`
        samples requested."""
        if place in self._kept:
            return self._kept[place]
        if self._broken is not None and self._once:
            raise self._broken
        if place < self._next or self._broken is not None:
            if self._once:
                raise InputError(
                    f"sample {place} of {self._name} has gone by",
                    code="stream-sample-passed",
                    why="an iterator can be read once, in order",
                    fix="give a function that makes it: Loader(make, ...), not Loader(make(), ...)",
                )
            self._restart()
        try:
            while self._next <= place:
                note_sample_begin(self._next, self._name)
                self._before(self._next)
                sample = self._read()
                self._next += 1
        finally:
            note_sample_end()
        self._kept[place] = sample
        while len(self._kept) > kept:
            del self._kept[next(iter(self._kept))]
        return sample

    def _read(self) -> Any:
        while True:
            try:
                sample = next(self._passes)
            except StopIteration:
                self._begin_again()
                continue
            except BaseException as error:
                # A generator that raised has ended: reading on would begin the next pass.
                if isinstance(error, GpumixError):  # specific enough already
                    self._broken = error
                    raise
                self._broken = BrokenStreamError(format_in_one_line(error))
                raise self._broken from error
            self._of_pass += 1
            return sample

    def _begin_again(self) -> None:
        self._bare = 0 if self._of_pass else self._bare + 1
        if self._bare == self._parts and self._passed_over:
            raise InputError(
                "nothing of the stream is left to train on",
                code="stream-empty-after-split",
                where=self._name,
                why=f"the first {self._passed_over} samples of each pass, or of each shard's, are "
                "held out for evaluation",
                fix="give more samples, lower eval_batches, or set data.validation_split to 0",
            )
        if self._bare == self._parts:
            raise InputError("the stream is empty", code="stream-empty", where=self._name)
        if self._once:
            raise InputError(
                f"{self._name} has ended after {format_count(self._of_pass, 'sample')}",
                code="stream-ended",
                why="an iterator can be read once",
                fix="give a function that makes it: Loader(make, ...), not Loader(make(), ...)",
            )
        self._epoch, self._of_pass = self._epoch + 1, 0
        self._passes = self._begin(self._epoch)


def _takes_epoch(stream: Any) -> bool:
    """Return whether the first argument of `stream` must be given, or is named `epoch`."""
    first = next(iter(inspect.signature(stream).parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.default is first.empty or first.name == "epoch"


def _copied(given: Any) -> Any:
    """Return a copy of a sample that may be changed, with new containers, tensors and arrays."""
    if isinstance(given, Tensor):
        return given.clone()
    if isinstance(given, np.ndarray):
        return given.copy()
    if type(given) in (list, tuple):
        many_leaves = _LEAVES.issuperset(map(type, given))  # such as tokens
        return type(given)(given if many_leaves else map(_copied, given))
    if isinstance(given, MutableMapping):
        found = copy(given)
        found.update((key, _copied(value)) for key, value in given.items())
        return found
    return given


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset has an order of its own, and no access by number."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    return hasattr(dataset, "__iter__") or (callable(dataset) and not isinstance(dataset, type))


def choose_part(lane: int, epoch: int, lanes: int) -> int:
    """Return the part a lane reads in a pass: distinct for all lanes, and all parts in `lanes`
    passes.

    If two lanes meet at one part, because others were short, they separate after it: by turns to
    either side, so no lane follows another (for an even number of lanes; a Williams design).
    """
    turn = epoch % lanes
    aside = (turn + 1) // 2
    return (lane + aside if turn % 2 else lane - aside) % lanes


def _lanes_of(stream: Any, global_batch: int) -> int:
    """Return the number of lanes: the largest with a whole share of a global batch and of the
    shards. With many shards per lane the division may be uneven: a lane with fewer shards moves on
    to the next part sooner."""
    shards = getattr(stream, "num_shards", None) or getattr(stream, "n_shards", None) or 1
    if not hasattr(stream, "shard") or not isinstance(shards, int):
        return 1
    return max(
        n
        for n in range(1, min(shards, global_batch) + 1)
        if global_batch % n == 0 and (shards % n == 0 or shards // n >= MANY_SHARDS)
    )
