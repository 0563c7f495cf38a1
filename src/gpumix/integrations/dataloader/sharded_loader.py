"""Each rank's part of every batch of a program's `DataLoader`, in the loader's order.

A batch is *global*: the samples of all ranks in a step. The program's sampler decides samples and
order; the plan only decides which rank reads which samples. The last batch of an epoch stays short:
no sample is read twice to fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from gpumix.engine.batch.batch_split import has_rows, select_samples
from gpumix.engine.batch.ragged_batch import RaggedRows, SampleEntries
from gpumix.engine.model.rng import preserve_all_rng
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.integrations.common.batch_rows import RowAssignment
from gpumix.schema.errors import InputError, format_in_one_line


class RankBatch(dict[str, Any]):
    """Collated samples of this rank's part of a batch, possibly none.

    Attributes:
        samples: of the global batch.
    """

    samples: int

    @classmethod
    def of(cls, values: Mapping[str, Any], *, samples: int) -> RankBatch:
        given = cls(values)
        given.samples = samples
        return given


@dataclass(frozen=True)
class RankPart:
    """This rank's part `values` of a batch, any tree of tensors. `samples` counts the global batch,
    `own` this rank: if 0, `values` may have a row that only shows shapes."""

    samples: int
    own: int
    values: Any


@dataclass
class PaddingScope:
    """Padded width of a rank's samples.

    Attributes:
        is_global: pad as in the global batch, which each rank then reads; otherwise pad to the
            longest of the rank's own samples.
    """

    is_global: bool = False


@dataclass(frozen=True)
class WantedSamples:
    """Samples of a batch that a rank reads.

    Attributes:
        samples: of the global batch.
        read: indices of samples to read: this rank's, or the global batch's; if empty, a sample
            that only shows shapes.
        own: places of this rank's samples in `read`.
    """

    samples: int
    read: list[Any]
    own: tuple[int, ...]

    @classmethod
    def of(cls, batch: Sequence[Any], rows: RowAssignment, width: PaddingScope) -> WantedSamples:
        places = tuple(place for of in rows(len(batch)) for place in of)
        if width.is_global:
            return cls(len(batch), list(batch), places)
        read = [batch[place] for place in places] or [batch[0]]
        return cls(len(batch), read, tuple(range(len(places))))


class GlobalBatches(BatchSampler):
    """Batches of a sampler's indices; epochs are passed on to the sampler.

    Args:
        most: samples computed at once; larger batches come in parts.
    """

    def __init__(self, sampler: Any, batch_size: int, most: int, *, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._most = most

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)  # type: ignore[arg-type]
        last = 0 if self.drop_last else rest
        return whole * -(-self.batch_size // self._most) + -(-last // self._most)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in super().__iter__():
            yield from _in_parts(batch, self._most)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class RankBatchSampler:
    """Batch sampler of this rank's part of each batch.

    Attributes:
        skipped: batches to skip at the beginning of the next pass.
    """

    def __init__(
        self, batch_sampler: GlobalBatches, rows: RowAssignment, width: PaddingScope
    ) -> None:
        self.batch_sampler = batch_sampler
        self._width = width
        self.skipped = 0
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        self._rows = rows

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[WantedSamples]:
        skipped, self.skipped = self.skipped, 0
        for batch in islice(self.batch_sampler, skipped, None):
            yield WantedSamples.of(batch, self._rows, self._width)


@dataclass(eq=False)
class RankCollator:
    """Collator of wanted samples, in the process reading them.

    Attributes:
        collate: the program's collate function.
        width: of padding, may change before the first batch is read.
    """

    collate: Callable[[list[Any]], Any]
    width: PaddingScope = field(default_factory=PaddingScope)

    def __call__(self, read: tuple[list[Any], WantedSamples]) -> Any:
        samples, wanted = read
        with count_as_host_memory():
            return self._handed_over(samples, wanted)

    def _handed_over(self, samples: list[Any], wanted: WantedSamples) -> Any:
        kept = _rows(wanted.own, collate_by_name(self.collate, samples))
        return RankBatch.of(kept, samples=wanted.samples)


@dataclass(eq=False)
class TreeCollator(RankCollator):
    """Collator for programs with batches of any trees of tensors: returns a `RankPart`.

    Attributes:
        stand_ins: keep the row read for a rank without samples.
    """

    stand_ins: bool = False

    def _handed_over(self, samples: list[Any], wanted: WantedSamples) -> RankPart:
        own = len(wanted.own)
        rows = wanted.own or ((0,) if self.stand_ins else ())
        return RankPart(wanted.samples, own, _rows(rows, collate_tree(self.collate, samples)))


def _rows(places: Sequence[int], batch: Any) -> Any:
    """Return rows of all tensors; a view, if the rows are the first."""
    first = tuple(places) == tuple(range(len(places)))
    return select_samples(batch, slice(len(places)) if first else places)


class WantedDataset(Dataset[Any]):
    """Map-style dataset reading wanted samples, with all attributes of the wrapped dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy under construction
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, wanted: WantedSamples) -> tuple[list[Any], WantedSamples]:
        several = getattr(self.dataset, "__getitems__", None)
        indices = wanted.read
        with count_as_host_memory():
            return several(indices) if several else [self.dataset[i] for i in indices], wanted


@dataclass(eq=False)
class RankStream(IterableDataset[Any]):
    """This rank's part of each batch of a stream. Every rank reads the full stream; each worker
    makes batches of its part of the stream, as in torch's loader."""

    dataset: Any
    batch_size: int
    rows: RowAssignment
    collate: RankCollator
    most: int
    drop_last: bool

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        with count_as_host_memory():
            for batch in iter(lambda: list(islice(samples, self.batch_size)), []):
                if len(batch) < self.batch_size and self.drop_last:
                    return
                for part in _in_parts(batch, self.most):
                    wanted = WantedSamples.of(part, self.rows, self.collate.width)
                    yield self.collate((wanted.read, wanted))


@dataclass(frozen=True)
class WorkerStart:
    """Start of a worker as in the program: `get_worker_info().dataset` is the program's own
    dataset.

    Attributes:
        begin: the program's `worker_init_fn`.
    """

    begin: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # frozen
        if self.begin is not None:
            self.begin(worker)


class RankLoader(DataLoader[Any]):
    """Loader of this rank's part of global batches, aware of epochs.

    Attributes:
        whole: the full dataset.
        total_batch_size: samples of all ranks in a batch, except the last batch.
        collated: makes batches of its samples.
    """

    whole: Any
    total_batch_size: int
    collated: Callable[[list[Any]], Any]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, and of a dataset with epochs."""
        if isinstance(self.batch_sampler, RankBatchSampler):
            self.batch_sampler.set_epoch(epoch)
        if hasattr(self.whole, "set_epoch"):
            self.whole.set_epoch(epoch)

    def after(self, skipped: int) -> Iterator[Any]:
        """Iterate over batches after the first `skipped`, which are not read if possible."""
        part = self.batch_sampler
        if isinstance(part, RankBatchSampler):
            part.skipped = skipped
            return super().__iter__()
        return islice(super().__iter__(), skipped, None)


L = TypeVar("L", bound=RankLoader)


def make_rank_loader(  # a DataLoader has as many settings
    dataset: Any,
    *,
    batch_size: int,
    rows: RowAssignment,
    collate: RankCollator,
    sampler: Any = None,
    most: int | None = None,
    drop_last: bool = False,
    kind: type[L] = RankLoader,  # type: ignore[assignment]
    **settings: Any,
) -> L:
    """Make a loader of this rank's part of a dataset's batches.

    Args:
        dataset: map-style, or a stream.
        batch_size: samples of all ranks together.
        sampler: of a map-style dataset's indices, equal on all ranks.
        most: samples computed at once; larger batches come in parts.
        kind: of the loader.
        settings: of torch's `DataLoader`.
    """
    most = batch_size if most is None else min(most, batch_size)
    if settings.get("num_workers"):
        settings["worker_init_fn"] = WorkerStart(settings.get("worker_init_fn"))
    if isinstance(dataset, IterableDataset):
        stream = RankStream(dataset, batch_size, rows, collate, most, drop_last)
        loader = kind(stream, batch_size=None, **settings)
    else:
        batches = GlobalBatches(
            torch.utils.data.SequentialSampler(dataset) if sampler is None else sampler,
            batch_size,
            most,
            drop_last=drop_last,
        )
        loader = kind(
            WantedDataset(dataset),
            batch_sampler=RankBatchSampler(batches, rows, collate.width),  # type: ignore[arg-type]
            collate_fn=collate,  # type: ignore[arg-type]
            **settings,
        )
    loader.whole, loader.collated = dataset, collate.collate
    loader.total_batch_size = batch_size
    return loader


def _in_parts(batch: list[Any], most: int) -> Iterator[list[Any]]:
    for begin in range(0, len(batch), most):
        yield batch[begin : begin + most]


def collate_by_name(collate: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, Any]:
    """Collate samples for programs that know the parts of a batch by name.

    Rows of a tensor with more or fewer rows than samples are assigned by collating each sample
    alone.

    Raises:
        InputError: the result is no dictionary of tensors with rows of each sample.
    """
    batch = collate(samples)
    if isinstance(batch, Mapping):
        entries = {n: _entries(v) for n, v in batch.items() if _is_per_sample(v, len(samples))}
        try:
            batch = _ragged(collate, samples, {**batch, **entries})
        except LookupError as error:
            raise InputError(
                "the data collator cannot make a batch of some samples alone",
                code="collate-of-some-samples",
                why=f"{format_in_one_line(error)}; it may leave samples out",
                fix="leave them out of the dataset",
            ) from error
    batch = _checked(batch, len(samples))
    if not isinstance(batch, dict):
        raise InputError(
            f"the data collator made a {type(batch).__name__}, not a dictionary",
            code="collate-not-dict",
            fix="return a dictionary of tensors by the names of forward's arguments",
        )
    return batch


def collate_tree(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Collate samples into any tree of tensors.

    Raises:
        InputError: the result has no tensors, or a tensor without a row per sample.
    """
    return _checked(collate(samples), len(samples))


def _checked(batch: Any, samples: int) -> Any:
    """Return a batch, with a plain dictionary for another mapping; raise InputError without
    tensors, or for a tensor without a row per sample."""
    if isinstance(batch, Mapping):  # pytrees know dictionaries, not all mappings
        batch = dict(batch)
    leaves = tree_flatten_with_path(batch, is_leaf=has_rows)[0]
    if not any(has_rows(leaf) for _, leaf in leaves):
        raise InputError(
            f"the data collator made a {type(batch).__name__} without tensors",
            code="collate-without-tensors",
            why="a batch is cut along the first dimension of its tensors",
            fix="return tensors, in dictionaries, tuples or lists",
        )
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != samples):
            raise InputError(
                f"of {samples} samples the data collator made {_named(path)} of shape "
                f"{tuple(leaf.shape)}",
                code="collate-rows-wrong",
                why="a batch is cut into micro-batches along its first dimension, which must be "
                "the samples: what lays several samples into one row cannot be cut",
                fix="use a collator that pads; to pack short samples do it in the dataset",
            )
    return batch


def _is_per_sample(value: Any, samples: int) -> bool:
    """Return True for a list with a dictionary, or a tensor, for each sample."""
    listed = isinstance(value, list) and len(value) == samples > 0
    return listed and all(isinstance(entry, Mapping | Tensor) for entry in value)


def _entries(values: Sequence[Any]) -> SampleEntries:
    return SampleEntries([dict(one) if isinstance(one, Mapping) else one for one in values])


def _ragged(
    collate: Callable[[list[Any]], Any], samples: list[Any], batch: dict[str, Any]
) -> dict[str, Any]:
    """Mark tensors with another number of rows than samples, and tensors accompanying them, with
    the rows of each sample; leave the batch unchanged if rows cannot be assigned."""
    tensors = {n: t for n, t in batch.items() if isinstance(t, Tensor) and t.dim()}
    if not samples or all(len(tensor) == len(samples) for tensor in tensors.values()):
        return batch
    with preserve_all_rng(torch.device("cpu")):  # in a process forked by a loader
        alone = [dict(collate([sample])) for sample in samples]
    found = dict(batch)
    for name, tensor in tensors.items():
        own = [one.get(name) for one in alone]
        parts = [tensor[:0] if part is None or not part.numel() else part for part in own]
        counts = tuple(map(len, parts))
        alike = {part.shape[1:] for part in parts} == {tensor.shape[1:]}
        if set(counts) != {1} and alike and torch.equal(torch.cat(parts), tensor):
            found[name] = RaggedRows(tensor, counts)
    return found


def _named(path: tuple[Any, ...]) -> str:
    keys = (str(getattr(one, "key", getattr(one, "idx", one))) for one in path)
    return f"'{'.'.join(keys)}'" if path else "a tensor"


def copy_sample(sample: Any) -> Any:
    """Return a copy of a sample for a collator, which may change it."""
    if not isinstance(sample, Mapping):
        return sample
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in sample.items()
    }
