"""Each rank's part of every batch of somebody else's `DataLoader`, in that one's order.

A batch is a *global* one: what all ranks compute in a step. Its samples, and their order, are those
of the program's own sampler; only who reads which of them is the plan's affair. The last one of an
epoch is as short as it is: no sample is read twice to fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from gpumix.engine.ragged import PerSample, RaggedRows, has_rows, take
from gpumix.engine.randomness import program_untouched
from gpumix.hardware.memory import host_memory
from gpumix.integrations.rows import Rows
from gpumix.spec.errors import InputError, in_a_line


class Given(dict[str, Any]):
    """This rank's part of a batch: its collated samples, of which it may have none.

    Attributes:
        samples: of the whole batch.
    """

    samples: int

    @classmethod
    def of(cls, values: Mapping[str, Any], *, samples: int) -> Given:
        given = cls(values)
        given.samples = samples
        return given


@dataclass(frozen=True)
class Part:
    """This rank's part of a batch that is any tree of tensors, `values`; `samples` are of the whole
    batch, `own` this rank's: where they are none there may be a row that stands for what they look
    like."""

    samples: int
    own: int
    values: Any


@dataclass
class Width:
    """How far a rank's samples are padded.

    Attributes:
        common: as far as those of the whole batch, which each rank then reads; else as far as its
            own.
    """

    common: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a rank reads of a batch.

    Attributes:
        samples: of the whole batch.
        read: indices of samples that are read: this rank's, or those of the whole batch; instead of
            none one that is read for what it looks like.
        own: places of this rank's samples in `read`.
    """

    samples: int
    read: list[Any]
    own: tuple[int, ...]

    @classmethod
    def of(cls, batch: Sequence[Any], rows: Rows, width: Width) -> Wanted:
        places = tuple(place for of in rows(len(batch)) for place in of)
        if width.common:
            return cls(len(batch), list(batch), places)
        read = [batch[place] for place in places] or [batch[0]]
        return cls(len(batch), read, tuple(range(len(places))))


class GlobalBatches(BatchSampler):
    """A sampler's indices in batches; told of epochs if the sampler wants to be.

    Args:
        most: samples that are computed at once; larger batches come in parts.
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


class OwnPart:
    """Of each batch of a batch sampler what this rank reads.

    Attributes:
        skipped: batches at the beginning that are passed over, the next time it is read.
    """

    def __init__(self, batch_sampler: GlobalBatches, rows: Rows, width: Width) -> None:
        self.batch_sampler = batch_sampler
        self._width = width
        self.skipped = 0
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        self._rows = rows

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Wanted]:
        skipped, self.skipped = self.skipped, 0
        for batch in islice(self.batch_sampler, skipped, None):
            yield Wanted.of(batch, self._rows, self._width)


class Collated:
    """Collates samples that were wanted, in the process that reads them.

    Args:
        collate: the program's own.
        width: how far samples are padded, to be changed before the first batch is read.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], width: Width | None = None) -> None:
        self.collate = collate
        self.width = width or Width()

    def __call__(self, read: tuple[list[Any], Wanted]) -> Any:
        samples, wanted = read
        with host_memory():
            return self._handed_over(samples, wanted)

    def _handed_over(self, samples: list[Any], wanted: Wanted) -> Any:
        kept = _rows(wanted.own, collated(self.collate, samples))
        return Given.of(kept, samples=wanted.samples)


class CollatedTree(Collated):
    """The same for programs whose batches are any trees of tensors: gives a `Part`.

    Args:
        stand_ins: whether the row is kept that is read where a rank has none.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        width: Width | None = None,
        *,
        stand_ins: bool = False,
    ) -> None:
        super().__init__(collate, width)
        self._stand_ins = stand_ins

    def _handed_over(self, samples: list[Any], wanted: Wanted) -> Part:
        own = len(wanted.own)
        rows = wanted.own or ((0,) if self._stand_ins else ())
        return Part(wanted.samples, own, _rows(rows, collated_tree(self.collate, samples)))


def _rows(places: Sequence[int], batch: Any) -> Any:
    """These rows of all tensors; a view, where they are the first ones."""
    first = tuple(places) == tuple(range(len(places)))
    return take(batch, slice(len(places)) if first else places)


class Readable(Dataset[Any]):
    """A map-style dataset of which samples are read as they are wanted; it has what that has."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, wanted: Wanted) -> tuple[list[Any], Wanted]:
        several = getattr(self.dataset, "__getitems__", None)
        indices = wanted.read
        with host_memory():
            return several(indices) if several else [self.dataset[i] for i in indices], wanted


class OwnOfStream(IterableDataset[Any]):
    """Of a stream the part of each batch that is this rank's. Every rank reads all of it; each of
    several workers makes batches of what the stream gives it, as those of torch's loader do."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        rows: Rows,
        collate: Collated,
        *,
        most: int,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self._batch_size = batch_size
        self._most = most
        self._rows = rows
        self._collate = collate
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        with host_memory():
            for batch in iter(lambda: list(islice(samples, self._batch_size)), []):
                if len(batch) < self._batch_size and self._drop_last:
                    return
                for part in _in_parts(batch, self._most):
                    wanted = Wanted.of(part, self._rows, self._collate.width)
                    yield self._collate((wanted.read, wanted))


@dataclass(frozen=True)
class Begun:
    """Begins a worker as the program does: what reads its dataset is not what it looks for there.

    Attributes:
        begin: the program's own `worker_init_fn`.
    """

    begin: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # frozen
        if self.begin is not None:
            self.begin(worker)


class OwnLoader(DataLoader[Any]):
    """This rank's part of global batches; told of epochs.

    Attributes:
        whole: the dataset, of which this is a part.
        total_batch_size: samples of all ranks in a batch, but for the last one.
        collated: makes batches of its samples.
    """

    whole: Any
    total_batch_size: int
    collated: Callable[[list[Any]], Any]

    def set_epoch(self, epoch: int) -> None:
        """Of the sampler, and of a dataset that knows epochs."""
        if isinstance(self.batch_sampler, OwnPart):
            self.batch_sampler.set_epoch(epoch)
        if hasattr(self.whole, "set_epoch"):
            self.whole.set_epoch(epoch)

    def after(self, skipped: int) -> Iterator[Any]:
        """Batches, but for some at the beginning, which are not read if they need not be."""
        part = self.batch_sampler
        if isinstance(part, OwnPart):
            part.skipped = skipped
            return super().__iter__()
        return islice(super().__iter__(), skipped, None)


L = TypeVar("L", bound=OwnLoader)


def own_loader(  # a DataLoader has as many settings
    dataset: Any,
    *,
    batch_size: int,
    rows: Rows,
    collate: Collated,
    sampler: Any = None,
    most: int | None = None,
    drop_last: bool = False,
    kind: type[L] = OwnLoader,  # type: ignore[assignment]
    **settings: Any,
) -> L:
    """This rank's part of a dataset's batches.

    Args:
        dataset: map-style, or a stream.
        batch_size: samples of all ranks together.
        sampler: of a map-style dataset's indices, the same on all ranks.
        most: samples that are computed at once; larger batches come in parts.
        kind: of the loader.
        settings: of torch's `DataLoader`.
    """
    most = batch_size if most is None else min(most, batch_size)
    if settings.get("num_workers"):
        settings["worker_init_fn"] = Begun(settings.get("worker_init_fn"))
    if isinstance(dataset, IterableDataset):
        stream = OwnOfStream(dataset, batch_size, rows, collate, most=most, drop_last=drop_last)
        loader = kind(stream, batch_size=None, **settings)
    else:
        batches = GlobalBatches(
            torch.utils.data.SequentialSampler(dataset) if sampler is None else sampler,
            batch_size,
            most,
            drop_last=drop_last,
        )
        loader = kind(
            Readable(dataset),
            batch_sampler=OwnPart(batches, rows, collate.width),  # type: ignore[arg-type]
            collate_fn=collate,  # type: ignore[arg-type]
            **settings,
        )
    loader.whole, loader.collated = dataset, collate.collate
    loader.total_batch_size = batch_size
    return loader


def _in_parts(batch: list[Any], most: int) -> Iterator[list[Any]]:
    for begin in range(0, len(batch), most):
        yield batch[begin : begin + most]


def collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, Any]:
    """What a collator makes of samples, for programs that know the parts of a batch by name.

    Rows of a tensor that are more or fewer than the samples are told apart by collating each sample
    alone.

    Raises:
        InputError: it is no dictionary whose tensors have rows of each sample.
    """
    batch = collate(samples)
    if isinstance(batch, Mapping):
        entries = {n: _entries(v) for n, v in batch.items() if _is_per_sample(v, len(samples))}
        try:
            batch = _ragged(collate, samples, {**batch, **entries})
        except LookupError as error:
            raise InputError(
                "the data collator cannot make a batch of some samples alone",
                why=f"{in_a_line(error)}; it may leave samples out",
                fix="leave them out of the dataset",
            ) from error
    batch = _checked(batch, len(samples))
    if not isinstance(batch, dict):
        raise InputError(
            f"the data collator made a {type(batch).__name__}, not a dictionary",
            fix="return a dictionary of tensors by the names of forward's arguments",
        )
    return batch


def collated_tree(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """What a collator makes of samples, which may be any tree of tensors.

    Raises:
        InputError: it has no tensors, or one of them has not one row for each sample.
    """
    return _checked(collate(samples), len(samples))


def _checked(batch: Any, samples: int) -> Any:
    """A batch whose tensors have one row for each sample, with dictionaries for classes like them.

    Raises:
        InputError: it has no tensors, or other ones.
    """
    if isinstance(batch, Mapping):  # trees are made of dictionaries, not of classes like them
        batch = dict(batch)
    leaves = tree_flatten_with_path(batch, is_leaf=has_rows)[0]
    if not any(has_rows(leaf) for _, leaf in leaves):
        raise InputError(
            f"the data collator made a {type(batch).__name__} without tensors",
            why="a batch is cut along the first dimension of its tensors",
            fix="return tensors, in dictionaries, tuples or lists",
        )
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != samples):
            raise InputError(
                f"of {samples} samples the data collator made {_named(path)} of shape "
                f"{tuple(leaf.shape)}",
                why="a batch is cut into micro-batches along its first dimension, which must be "
                "the samples: what lays several samples into one row cannot be cut",
                fix="use a collator that pads; to pack short samples do it in the dataset",
            )
    return batch


def _is_per_sample(value: Any, samples: int) -> bool:
    """Whether it is a list with a dictionary, or a tensor, for each sample."""
    listed = isinstance(value, list) and len(value) == samples > 0
    return listed and all(isinstance(entry, Mapping | Tensor) for entry in value)


def _entries(values: Sequence[Any]) -> PerSample:
    return PerSample([dict(one) if isinstance(one, Mapping) else one for one in values])


def _ragged(
    collate: Callable[[list[Any]], Any], samples: list[Any], batch: dict[str, Any]
) -> dict[str, Any]:
    """A batch whose tensors with another number of rows than samples, and those beside them, know
    how many of them each sample has; the batch as it is, where that cannot be told."""
    tensors = {n: t for n, t in batch.items() if isinstance(t, Tensor) and t.dim()}
    if not samples or all(len(tensor) == len(samples) for tensor in tensors.values()):
        return batch
    with program_untouched(torch.device("cpu")):  # in a process that a loader has forked
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


def fresh(sample: Any) -> Any:
    """A sample for a collator, which may change what it is given."""
    if not isinstance(sample, Mapping):
        return sample
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in sample.items()
    }
