"""Map-style datasets as sources, with samples fetched individually and stacked.

The first sample sets the keys, shapes and dtypes; an error names any sample that differs.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpumix.data.core import sample_rng
from gpumix.data.core.read_policy import (
    DEFAULT_READING,
    SEVERAL,
    Reading,
    note_sample_begin,
    note_sample_end,
    notes,
)
from gpumix.data.core.source import Source, hash_parts, sort_by_key, sort_keys
from gpumix.data.workers.batch_layout import Batch
from gpumix.data.workers.fetch import DataChangedError, find_readable
from gpumix.schema.errors import InputError, format_in_one_line

TEXT_SAMPLE_FIX = (
    "return tokens; or have a job tokenise texts: --set data.tokenize=on-the-fly --set "
    "data.packing=none"
)

Collate = Callable[[list[Any]], Batch]
"""Function from a list of samples to a batch: tensors by key, with samples in the first
dimension."""


class MapStyleSource(Source):
    """Base of sources of a map-style dataset.

    Args:
        dataset: the dataset.
        name: name of the dataset in errors and in the fingerprint.
        thread_safe: whether several threads may index it at once; default: the dataset's attribute
            of that name, if any.
        reading: whether another sample may represent all if the first is bad.

    Raises:
        InputError: the dataset is not map-style or is empty, or its first sample is invalid.
        TrainingError: its first sample cannot be read.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        thread_safe: bool | None = None,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        self._dataset = MapStyle(dataset, name, thread_safe)
        self.name, self.thread_safe = name, self._dataset.thread_safe
        find_readable(self._learn, len(self), name, reading)

    @abstractmethod
    def _learn(self, indices: np.ndarray) -> None:
        """Learn the form of all samples from one."""

    @property
    def draws(self) -> bool:
        return self._dataset.draws

    def __len__(self) -> int:
        return len(self._dataset)


class SampleSource(MapStyleSource):
    """A dataset with `len` and indexing whose samples are dictionaries of tensors, numpy arrays,
    numbers, or lists of numbers.

    Samples are read by `__getitems__` (list of indices to list of samples) if available. The
    fingerprint covers the name, the length and the shape of a sample, but not the content: that may
    be augmented at random.
    """

    @property
    def first(self) -> dict[str, Tensor]:
        """The sample that sets keys, shapes and dtypes for all."""
        return self._stack.first

    @property
    def writes(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        return hash_parts(self.name, len(self), self._stack.shapes)

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        if not len(indices):
            return self._stack.empty
        return self._stack.of(indices, self._dataset.fetch(indices.tolist()))

    def rows_into(self, indices: np.ndarray, target: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write each sample once read, to free memory for the next."""
        numbers = indices.tolist()

        def put(row: int, sample: Any) -> None:
            for key, value in self._stack.convert_like_first(numbers[row], sample).items():
                target[key][row] = value

        if numbers:
            self._dataset.read(numbers, put)
        return target

    def _learn(self, indices: np.ndarray) -> None:
        [index] = indices.tolist()
        self._stack = SampleStacker(self.name, self._dataset.fetch([index])[0], index)

    def samples(self, indices: np.ndarray) -> list[dict[str, Tensor]]:
        """Return the samples at `indices`, of any shapes."""
        samples = zip(indices.tolist(), self._dataset.fetch(indices.tolist()), strict=True)
        found = [(index, self._stack.tensors(index, sample)) for index, sample in samples]
        for index, sample in found:
            self._stack.check_keys(index, sample)
        return [sample for _, sample in found]


class SampleStacker:
    """A stacker of samples that match the first in keys, shapes and dtypes.

    Args:
        name: name of the dataset in errors.
        first: the first sample; `index`: its number.

    Raises:
        InputError: the sample is no dictionary of values convertible to tensors.
    """

    def __init__(self, name: str, first: Any, index: int = 0) -> None:
        self._name = name
        self._index = index
        self.first = self.tensors(index, first)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Key, shape and dtype of each value of a sample, sorted by key."""
        return [(k, tuple(v.shape), str(v.dtype)) for k, v in sort_by_key(self.first)]

    @property
    def empty(self) -> Batch:
        """A batch without samples."""
        return {key: value.new_empty((0, *value.shape)) for key, value in self.first.items()}

    def of(self, indices: np.ndarray, samples: Sequence[Any]) -> Batch:
        """Stack the samples numbered `indices`.

        Raises:
            InputError: a sample does not match the first.
        """
        pairs = zip(indices.tolist(), samples, strict=True)
        found = [self.convert_like_first(index, sample) for index, sample in pairs]
        return {key: torch.stack([sample[key] for sample in found]) for key in self.first}

    def convert_like_first(self, index: int, sample: Any) -> dict[str, Tensor]:
        """Return the tensors of a sample.

        Raises:
            InputError: they do not match the tensors of the first.
        """
        found = self.tensors(index, sample)
        self.check_keys(index, found)
        for key, value in found.items():
            first = self.first[key]
            if value.shape != first.shape or value.dtype != first.dtype:
                raise InputError(
                    f"'{key}' of sample {index} is {value.dtype}{list(value.shape)}, that of "
                    f"sample {self._index} {first.dtype}{list(first.shape)}",
                    code="sample-shape-differs",
                    where=self._name,
                    why="samples are stacked, so all need one shape and dtype",
                    fix="set data.packing to none (pads each micro-batch) or documents; or pad and "
                    "cut the samples in the dataset"
                    if value.shape != first.shape
                    else f"let all have one dtype: sample['{key}'].to({first.dtype})",
                )
        return found

    def tensors(self, index: int, sample: Any) -> dict[str, Tensor]:
        """Return the tensors of a sample, of any shapes.

        Raises:
            InputError: the sample is no dictionary of values convertible to tensors.
        """
        return tensors_of(sample, f"sample {index}", self._name)

    def check_keys(self, index: int, sample: dict[str, Tensor]) -> None:
        """Raise InputError if a sample has other keys than the first."""
        if sample.keys() != self.first.keys():
            raise InputError(
                f"sample {index} holds {sort_keys(sample)}, sample {self._index} "
                f"{sort_keys(self.first)}",
                code="sample-keys-differ",
                where=self._name,
                fix="let all samples have the same keys",
            )


def tensors_of(sample: Any, what: str, name: str) -> dict[str, Tensor]:
    """Return the tensors of a sample.

    Args:
        what: name of the sample, `name` of the dataset, in errors.

    Raises:
        InputError: the sample is no dictionary of values convertible to tensors.
    """
    if not isinstance(sample, Mapping) or not sample:
        article = "an empty" if isinstance(sample, Mapping) else "a"
        raise InputError(
            f"{what} is {article} {type(sample).__name__}, not a dictionary of tensors",
            code="sample-not-dict",
            where=name,
            fix=TEXT_SAMPLE_FIX
            if isinstance(sample, str)
            else "return {'input_ids': ..., 'labels': ...} from __getitem__; or, in a loop of "
            "one's own, make a batch of samples: Loader(collate=...)",
        )
    return {key: _tensor(value, key, what, name) for key, value in sample.items()}


def _tensor(value: Any, key: str, what: str, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return _detach_dense(value, what, key, name)
    try:
        array = np.array(value)
        if array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
            array = array.astype(np.float32)  # Python's numbers get torch's default dtype
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what} holds '{key}', a {type(value).__name__} that is no tensor",
            code="sample-value-not-tensor",
            where=name,
            why=str(error),
            fix=TEXT_SAMPLE_FIX
            if isinstance(value, str)
            else "return tensors, numpy arrays, numbers or flat lists of numbers",
        ) from error


def _detach_dense(value: Tensor, what: str, key: str, name: str) -> Tensor:
    """Detach a tensor from its graph, which another process would not know either."""
    if value.layout != torch.strided:
        raise InputError(
            f"{what} holds '{key}', a sparse tensor",
            code="sample-tensor-sparse",
            where=name,
            fix="make it a dense one: .to_dense()",
        )
    return value.detach()


class CollatedSource(MapStyleSource):
    """A map-style dataset of samples of any kind, with a function that makes batches.

    Args:
        collate: receives the samples of a whole batch.
        settings: see `MapStyleSource`.
    """

    splits = False

    def __init__(self, dataset: Any, name: str, collate: Collate, **settings: Any) -> None:
        self._collate = collate
        self._collate_draws = False
        super().__init__(dataset, name, **settings)

    def _learn(self, indices: np.ndarray) -> None:
        self._empty = {key: value[:0] for key, value in self.rows(indices).items()}

    @property
    def draws(self) -> bool:
        return self._dataset.draws or self._collate_draws

    @property
    def fingerprint(self) -> str:
        return hash_parts(self.name, len(self), sort_keys(self._empty))

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        if not len(indices):
            return self._empty
        samples = self._dataset.fetch(indices.tolist())
        with sample_rng.watch_draws() as drawn:
            batch = call_collate(self._collate, samples, self.name)
        self._collate_draws |= drawn.of_process
        return batch


def call_collate(collate: Collate, samples: Sequence[Any], name: str) -> Batch:
    """Return the batch that `collate` makes of samples.

    Raises:
        InputError: the result is no batch of the samples.
    """
    sample_rng.seed_collate()
    # `collate` may pop keys, but not from the dataset's own dictionaries.
    batch = collate([copy(one) if isinstance(one, dict) else one for one in samples])
    if not isinstance(batch, Mapping) or not batch:
        raise InputError(
            f"`collate` returns a {type(batch).__name__}, not a dictionary of tensors",
            code="collate-not-dict",
            where=name,
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (len(samples),):
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"`collate` makes of {len(samples)} samples '{key}': {found}",
                code="collate-rows-wrong",
                where=name,
                why="each rank takes some of the samples: tensors have them in the first dimension",
            )
    return {key: _detach_dense(value, "a batch", key, name) for key, value in batch.items()}


class MapStyle:
    """A dataset with `len` and indexing, read by `__getitems__` (a list of indices to a list of
    samples) where available.

    Once random draws are seen, samples are read one by one, each seeded by its position in the
    order.

    Attributes:
        draws: whether it draws from generators of the process.

    Raises:
        InputError: the dataset is not map-style, or is empty.
    """

    def __init__(self, dataset: Any, name: str, thread_safe: bool | None = None) -> None:
        self._dataset, self._name = dataset, name
        self._len = _length(dataset, name)
        said = bool(getattr(dataset, "thread_safe", False))
        self.thread_safe = said if thread_safe is None else thread_safe
        self.draws = self._one_by_one = False
        # A user's dataset need not be safe for two threads.
        self._lock = nullcontext() if self.thread_safe else threading.Lock()

    def __reduce__(self) -> tuple[type[MapStyle], tuple[Any, str, bool]]:
        # A lock cannot be pickled.
        return MapStyle, (self._dataset, self._name, self.thread_safe)

    def __len__(self) -> int:
        return self._len

    def fetch(self, indices: list[int]) -> Sequence[Any]:
        found: list[Any] = [None] * len(indices)
        self.read(indices, found.__setitem__)
        return found

    def read(self, indices: list[int], put: Callable[[int, Any], None]) -> None:
        """Read the samples at `indices`, and call `put` with the place in the list and the sample;
        twice for each if they turn out to draw at random."""
        with self._lock:
            now = _counted(self._dataset, self._name)
            if now != self._len:
                raise DataChangedError(
                    f"the dataset had {self._len} samples when it was opened, and has {now} now",
                    code="dataset-length-changed",
                    where=self._name,
                    why="the order of samples goes by their number",
                    fix="begin a new run, or let the dataset keep its length",
                )
            try:
                self._read(indices, put)
            finally:
                note_sample_end()

    def _read(self, indices: list[int], put: Callable[[int, Any], None]) -> None:
        if not self._one_by_one:
            with sample_rng.watch_draws() as drawn:
                self._together(indices, put)
            if not drawn:
                return
            self._one_by_one, self.draws = True, self.draws or drawn.of_process
        for row, index in enumerate(indices):
            sample_rng.seed_row(row)
            self._together([index], put, first=row)

    def _together(
        self, indices: list[int], put: Callable[[int, Any], None], *, first: int = 0
    ) -> None:
        if hasattr(self._dataset, "__getitems__"):
            note_sample_begin(indices[0], self._name)
            try:
                samples = self._dataset.__getitems__(indices)
            except BaseException:
                notes.failed = SEVERAL
                raise
            for row, (_, sample) in enumerate(zip(indices, samples, strict=True), first):
                put(row, sample)
            return
        for row, index in enumerate(indices, first):
            put(row, self._read_sample(index))

    def _read_sample(self, index: int) -> Any:
        note_sample_begin(index, self._name)
        try:
            return self._dataset[index]
        except BaseException:
            notes.failed = index
            raise


def as_source(
    dataset: Any,
    collate: Collate | None = None,
    *,
    thread_safe: bool | None = None,
    reading: Reading = DEFAULT_READING,
) -> Source:
    """Return `dataset` itself if a source, otherwise wrapped in a `SampleSource` or
    `CollatedSource`.

    Raises:
        InputError: the dataset is a source already, and `collate` is given.
    """
    name = type(dataset).__name__
    if isinstance(dataset, Source):
        if collate is not None:
            raise InputError(
                "a source makes batches itself: `collate` is for datasets",
                code="collate-of-source",
                where=name,
            )
        return dataset
    if collate is not None:
        return CollatedSource(dataset, name, collate, thread_safe=thread_safe, reading=reading)
    return SampleSource(dataset, name, thread_safe=thread_safe, reading=reading)


def _length(dataset: Any, name: str) -> int:
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        raise InputError(
            f"a {type(dataset).__name__} is indexed by its columns, not by the number of a sample",
            code="dataset-indexed-by-column",
            where=name,
            fix="give its rows: datasets.Dataset.from_pandas(...), or .to_dict('records')",
        )
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        raise InputError(
            f"a {type(dataset).__name__} has no sample 0, it has {', '.join(map(repr, dataset))}",
            code="dataset-of-splits",
            where=name,
            fix=f"if these are datasets, give one: dataset[{next(iter(dataset))!r}]; if they are "
            "columns: datasets.Dataset.from_dict(dataset)",
        )
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"a {type(dataset).__name__} is no map-style dataset",
            code="dataset-not-map-style",
            where=name,
            why="samples are read by index, in one order for all ranks: it needs __len__ and "
            "__getitem__",
            fix="return the dataset itself"
            if dataset is None
            else "write the stream to disk and index it, for example with datasets.save_to_disk",
        )
    count = _counted(dataset, name)
    if not count:
        raise InputError("the dataset is empty", code="dataset-empty", where=name)
    return count


def _counted(dataset: Any, name: str) -> int:
    try:
        return len(dataset)
    except Exception as error:  # raised by the dataset
        raise InputError(
            f"the dataset does not say how many samples it has: {format_in_one_line(error)}",
            code="dataset-length-unreadable",
            where=name,
            fix="let its __len__ return their number",
        ) from error
