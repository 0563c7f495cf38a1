"""Sources of training data: samples with random access.

A source returns the samples at any indices at once, as a dictionary of tensors. Subclasses know
where samples come from (packed text, a saved dataset, a factory).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpumix.data.core.read_policy import Skipped, record_skipped_part
from gpumix.data.core.token_file import PackedText
from gpumix.schema.errors import InputError

T = TypeVar("T")

IGNORED = -100  # a label ignored by the loss


class Source(ABC):
    """Samples 0 to len - 1: dictionaries of tensors with equal keys, shapes and dtypes. Samples of
    different lengths are padded to the longest requested.

    `rows` is called from one background thread and, in an evaluation, from the caller's at the same
    time; or from several processes, each with a copy of its own.

    Attributes:
        name: name of the source in errors.
        splits: whether a batch can be fetched in parts, each sample by itself.
        thread_safe: whether several threads may call `rows` at once.
        in_order: whether samples come in an order of their own: index is position.
        parallel: whether several workers are faster than one.
        once: whether samples can be read only once, and by this process.
    """

    name: str = "the dataset"
    splits: bool = True
    thread_safe: bool = False
    in_order: bool = False
    parallel: bool = True
    once: bool = False

    @property
    def draws(self) -> bool:
        """True if reading a sample draws at random from generators of the process."""
        return False

    @property
    def writes(self) -> bool:
        """True if `rows_into` saves a copy."""
        return False

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the samples and the order, independent of the location of files."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the samples at `indices` (int64, one dimension), stacked along a new first
        dimension.

        For no indices: tensors without rows, with the right dtypes and trailing dimensions.
        """

    def rows_into(self, indices: np.ndarray, target: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows, written into `target` (tensors like the result of `rows`) if possible.
        Unless the result is `target`, the contents of `target` are undefined."""
        return self.rows(indices)

    @property
    def lengths(self) -> np.ndarray | None:
        """Tokens of each sample, if they differ and are known."""
        return None

    def number(self, index: int) -> int:
        """Return a sample's number in the original data."""
        return index

    def specimen(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return a batch as costly in time and memory as any with as many samples; for equal
        samples, simply the samples at `indices`."""
        return self.rows(indices)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {key: value[0] for key, value in self.rows(np.array([index])).items()}


class PackedSource(Source):
    """Packed text: `input_ids` and, with equal values, `labels`, both int64[k, L]."""

    name = "the text"
    thread_safe = True

    def __init__(self, text: PackedText) -> None:
        self._text = text

    @property
    def fingerprint(self) -> str:
        return hash_parts(self._text.sha256, self._text.sequence_length)

    def __len__(self) -> int:
        return len(self._text)

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self._text.tokens(indices))
        return {"input_ids": tokens, "labels": tokens.clone()}  # a caller may mask labels in place


class InMemorySource(Source):
    """Samples in memory: tensors with samples in the first dimension.

    Args:
        skipped: samples that could not be read, by index, reported whenever requested.
    """

    thread_safe = True

    def __init__(
        self, name: str, rows: dict[str, Tensor], skipped: Collection[Skipped] = ()
    ) -> None:
        self.name = name
        self._rows = rows
        self._skipped = skipped

    @property
    def fingerprint(self) -> str:
        shapes = [(key, tuple(t.shape), str(t.dtype)) for key, t in sort_by_key(self._rows)]
        return hash_parts(self.name, "kept", shapes)

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        for row, index in enumerate(np.asarray(indices).tolist()):
            for one in self._skipped:
                if one.of == index:
                    record_skipped_part(row, one)
        wanted = torch.from_numpy(np.asarray(indices))
        return {key: value[wanted] for key, value in self._rows.items()}


class SourceWrapper(Source):
    """Base of sources with the samples and the order of another source.

    Attributes:
        _whole: the other source.
    """

    _whole: Source

    @property
    def draws(self) -> bool:
        return self._whole.draws

    @property
    def fingerprint(self) -> str:
        return self._whole.fingerprint

    @property
    def lengths(self) -> np.ndarray | None:
        return self._whole.lengths

    def __len__(self) -> int:
        return len(self._whole)

    def number(self, index: int) -> int:
        return self._whole.number(index)


class DerivedSource(SourceWrapper):
    """A source derived from another, which can be read in the same ways."""

    def __init__(self, whole: Source) -> None:
        self._whole = whole
        self.name = whole.name
        self.splits = whole.splits
        self.thread_safe = whole.thread_safe
        self.in_order = whole.in_order
        self.parallel = whole.parallel
        self.once = whole.once

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._whole.rows(indices)

    def specimen(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._whole.specimen(indices)


class LabelingSource(DerivedSource):
    """A source with labels added by `with_labels`, for a model that predicts next tokens."""

    def specimen(self, indices: np.ndarray) -> dict[str, Tensor]:
        return with_labels(self._whole.specimen(indices))

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        return with_labels(self._whole.rows(indices))


def with_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add missing `labels` to a batch: the `input_ids`, or -100 where `attention_mask` is 0."""
    tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
    if tokens is None or "labels" in batch:
        return batch
    # A caller may mask labels in place.
    labels = tokens.clone() if mask is None else tokens.masked_fill(mask == 0, IGNORED)
    return {**batch, "labels": labels}


class VocabularyCheckedSource(DerivedSource):
    """A source for a language model, with a check of `input_ids`, and of `labels` that count,
    against the model's vocabulary. Unknown tokens fail somewhere inside the model, on a GPU without
    naming the sample. Both become int64, as models expect.

    Args:
        aligned: whether labels correspond to tokens one to one; labels of a decoder do not.
    """

    def __init__(self, whole: Source, vocabulary: int, *, aligned: bool = True) -> None:
        super().__init__(whole)
        self._vocabulary = vocabulary
        self._aligned = aligned

    def specimen(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._known(self._whole.specimen(indices), indices)

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._known(self._whole.rows(indices), indices)

    def _known(self, batch: dict[str, Tensor], indices: np.ndarray) -> dict[str, Tensor]:
        tokens, labels = batch.get("input_ids"), batch.get("labels")
        if tokens is None:
            return batch
        known = {"input_ids": self._checked("input_ids", tokens, tokens, indices)}
        if labels is not None:
            known["labels"] = self._checked("labels", labels, tokens, indices)
        return {**batch, **known}

    def _checked(self, key: str, values: Tensor, tokens: Tensor, indices: np.ndarray) -> Tensor:
        if values.dim() != 2 or values.is_floating_point():
            raise InputError(
                f"'{key}' of {self._some(indices)} are {values.dtype}{list(values.shape[1:])}",
                code="sample-field-invalid",
                where=self.name,
                fix="give whole numbers in one dimension: a token each",
            )
        if self._aligned and values.shape != tokens.shape:
            raise InputError(
                f"{self._some(indices)} has {tokens.shape[1]} input_ids and "
                f"{values.shape[1]} {key}",
                code="sample-length-mismatch",
                where=self.name,
                why="each belongs to a token",
                fix=f"make them as long as input_ids, {IGNORED} where nothing is to be learnt",
            )
        values = values.long()
        unknown = _unknown(key, values, self._vocabulary)
        if unknown.any():
            row = int(unknown.any(1).nonzero()[0])
            what = self._some(indices[row:])
            check_vocabulary(key, values[row], self._vocabulary, what=what, name=self.name)
        return values

    def _some(self, indices: np.ndarray) -> str:
        return f"sample {self.number(int(indices[0]))}" if len(indices) else "each sample"


def check_vocabulary(key: str, values: Tensor, vocabulary: int, *, what: str, name: str) -> None:
    """Check tokens or labels of a sample against a vocabulary.

    Args:
        key: `input_ids` or `labels`; `values`: those of one sample.
        what: name of the sample, `name` of the dataset, in errors.

    Raises:
        InputError: a model of this vocabulary does not know all values.
    """
    unknown = _unknown(key, values, vocabulary)
    if unknown.any():
        one = "token" if key == "input_ids" else "label"
        raise InputError(
            f"{what} holds {one} {int(values[unknown][0])}, the model knows 0 to {vocabulary - 1}",
            code="token-outside-vocabulary",
            where=name,
            fix="raise vocab_size of model.config, or make the samples with the model's own "
            "tokenizer",
        )


def _unknown(key: str, values: Tensor, vocabulary: int) -> Tensor:
    """Return a mask of values outside the vocabulary."""
    unknown = (values < 0) | (values >= vocabulary)
    return unknown & (values != IGNORED) if key == "labels" else unknown


class SourceSlice(DerivedSource):
    """Samples [start, stop) of another source."""

    def __init__(self, whole: Source, start: int, stop: int) -> None:
        super().__init__(whole)
        self._start = start
        self._stop = stop

    @property
    def writes(self) -> bool:
        return self._whole.writes

    @property
    def fingerprint(self) -> str:
        return hash_parts(self._whole.fingerprint, self._start, self._stop)

    @property
    def lengths(self) -> np.ndarray | None:
        of_all = self._whole.lengths
        return None if of_all is None else of_all[self._start : self._stop]

    def __len__(self) -> int:
        return self._stop - self._start

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._whole.rows(np.asarray(indices) + self._start)

    def rows_into(self, indices: np.ndarray, target: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._whole.rows_into(np.asarray(indices) + self._start, target)

    def number(self, index: int) -> int:
        return self._whole.number(index + self._start)

    def specimen(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._whole.specimen(np.asarray(indices) + self._start)


def split_held_out(whole: Source, held_out: float) -> tuple[Source, Source]:
    """Return (train, held out): the last part `held_out` of the samples, at least one unless 0.

    Raises:
        InputError: nothing is left to train on.
    """
    n = len(whole)
    kept = max(1, int(n * held_out)) if held_out else 0
    if kept >= n:
        raise InputError(
            f"the data has {n} sample{'s' if n != 1 else ''}, and data.validation_split keeps "
            f"{kept} of them for evaluation: none is left to train on",
            code="no-samples-left-to-train",
            fix="give more data, lower sequence_length, or set data.validation_split to 0",
        )
    return SourceSlice(whole, 0, n - kept), SourceSlice(whole, n - kept, n)


def sort_keys(keys: Iterable[Any]) -> list[Any]:
    """Sort the keys of a sample, which may be of any types."""
    return sorted(keys, key=str)


def sort_by_key(values: Mapping[Any, T]) -> list[tuple[Any, T]]:
    return [(key, values[key]) for key in sort_keys(values)]


def hash_parts(*parts: object) -> str:
    """Return sixteen hex digits that change with any part."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
