"""Any map-style dataset as a source: samples are fetched one by one and stacked.

The first sample sets the keys, shapes and dtypes; one that differs is an error that names it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpumix.data.rows import Source, digest
from gpumix.spec.errors import InputError


class SampleSource(Source):
    """A dataset with `len` and indexing whose samples are dictionaries of tensors, numpy arrays,
    numbers, or lists of numbers.

    A dataset that offers `__getitems__` (a list of indices to a list of samples) is asked that way.

    Args:
        dataset: the dataset.
        name: what to call it in errors and in the fingerprint, which holds the name, the length and
            the shape of a sample, but not the content: that may be augmented at random.

    Raises:
        InputError: it is not map-style, it is empty, or its first sample is not such a dictionary.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._name = name
        self._lock = threading.Lock()  # a dataset of the user's need not be safe for two threads
        self._len = _length(dataset, name)
        self._template = self._tensors(0, self._fetch([0])[0])

    @property
    def fingerprint(self) -> str:
        shapes = [(k, tuple(v.shape), str(v.dtype)) for k, v in sorted(self._template.items())]
        return digest(self._name, self._len, shapes)

    def __len__(self) -> int:
        return self._len

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        if not len(indices):
            return {
                key: value.new_empty((0, *value.shape)) for key, value in self._template.items()
            }
        wanted = [int(i) for i in indices]
        samples = [self._tensors(i, s) for i, s in zip(wanted, self._fetch(wanted), strict=True)]
        for index, sample in zip(wanted, samples, strict=True):
            self._check(index, sample)
        return {key: torch.stack([sample[key] for sample in samples]) for key in self._template}

    def _fetch(self, indices: list[int]) -> Sequence[Any]:
        with self._lock:
            if hasattr(self._dataset, "__getitems__"):
                samples: Sequence[Any] = self._dataset.__getitems__(indices)
                return samples
            return [self._dataset[i] for i in indices]

    def _tensors(self, index: int, sample: Any) -> dict[str, Tensor]:
        if not isinstance(sample, Mapping) or not sample:
            raise InputError(
                f"sample {index} is a {type(sample).__name__}, not a dictionary of tensors",
                where=self._name,
                fix="return {'input_ids': ..., 'labels': ...} from __getitem__",
            )
        return {key: self._tensor(index, key, value) for key, value in sample.items()}

    def _tensor(self, index: int, key: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        try:
            array = np.array(value)
            if array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
                array = array.astype(np.float32)  # Python's numbers follow torch's default
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"sample {index} holds '{key}', a {type(value).__name__} that is no tensor",
                where=self._name,
                why=str(error),
                fix="return tensors, numpy arrays, numbers or flat lists of numbers",
            ) from error

    def _check(self, index: int, sample: dict[str, Tensor]) -> None:
        if sample.keys() != self._template.keys():
            raise InputError(
                f"sample {index} holds {sorted(sample)}, sample 0 {sorted(self._template)}",
                where=self._name,
            )
        for key, value in sample.items():
            first = self._template[key]
            if value.shape != first.shape or value.dtype != first.dtype:
                raise InputError(
                    f"'{key}' of sample {index} is {value.dtype}{list(value.shape)}, that of "
                    f"sample 0 {first.dtype}{list(first.shape)}",
                    where=self._name,
                    why="samples are stacked, so all need one shape and dtype",
                    fix="pad or cut the samples in the dataset",
                )


def as_source(dataset: Any) -> Source:
    """`dataset` itself if it is a source, a `SampleSource` around it otherwise."""
    if isinstance(dataset, Source):
        return dataset
    return SampleSource(dataset, type(dataset).__name__)


def _length(dataset: Any, name: str) -> int:
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"a {type(dataset).__name__} is no map-style dataset",
            where=name,
            why="samples are read by index, in one order for all ranks: it needs __len__ and "
            "__getitem__",
            fix="write the stream to disk and index it, for example with datasets.save_to_disk",
        )
    if not len(dataset):
        raise InputError("the dataset is empty", where=name)
    return len(dataset)
