"""Samples of different lengths, padded to the longest sample requested.

Subclasses of `RaggedSource` provide the tokens of samples; this module makes tensors of them.
Nothing is padded to the longest sample of all, unless it is among those requested.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpumix.data.core.read_policy import DEFAULT_READING, Reading
from gpumix.data.core.source import IGNORED, Source, SourceWrapper, check_vocabulary
from gpumix.data.workers.fetch import find_readable
from gpumix.schema.errors import InputError

TOKENS, LABELS, MASK = "input_ids", "labels", "attention_mask"
PER_TOKEN_KEYS = (TOKENS, LABELS, MASK, "token_type_ids", "position_ids")
DECODER_KEYS = (LABELS, "decoder_input_ids", "decoder_attention_mask")

Sample = dict[str, Tensor]
"""Tensors whose first dimension is the sample's tokens, `input_ids` among them."""


class RaggedSource(Source):
    """Samples of at most `longest` tokens.

    `rows` pads on the right: `input_ids` with `pad_token`, `attention_mask` with 0, `labels` with
    -100, all else with 0. Without labels, the tokens are the labels.

    Attributes:
        template: number of a readable sample, which gives keys and dtypes.
    """

    splits = False
    template: int = 0

    def __init__(self, *, longest: int, pad_token: int) -> None:
        self.longest = longest
        self.pad_token = pad_token

    @abstractmethod
    def samples(self, indices: np.ndarray) -> list[Sample]:
        """Return the samples at `indices`, each with 1 to `longest` tokens, without padding."""

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        # With no rows requested, a sample gives keys and dtypes.
        wanted = indices if len(indices) else np.array([self.template])
        batch = pad_samples(self.samples(wanted), self.pad_token)
        return {key: value[: len(indices)] for key, value in batch.items()}

    def specimen(self, indices: np.ndarray) -> dict[str, Tensor]:
        sample = self.samples(np.array([self.template]))[0]
        return make_longest_batch(sample, len(indices), self.longest)


class VocabularyCheckedDocuments(SourceWrapper, RaggedSource):
    """Samples of another source, each checked against the model's vocabulary before packing, which
    numbers samples differently. See `KnownTokens`."""

    _whole: RaggedSource

    def __init__(
        self, whole: RaggedSource, vocabulary: int, *, reading: Reading = DEFAULT_READING
    ) -> None:
        super().__init__(longest=whole.longest, pad_token=whole.pad_token)
        self.name = whole.name
        self._whole, self._vocabulary = whole, vocabulary
        self.template = find_readable(self.samples, len(self), self.name, reading)

    def samples(self, indices: np.ndarray) -> list[Sample]:
        found = self._whole.samples(indices)
        for index, sample in zip(indices.tolist(), found, strict=True):
            check_document(sample, self._vocabulary, f"sample {self.number(index)}", self.name)
        return found


def check_document(sample: Sample, vocabulary: int, what: str, name: str) -> None:
    """Check tokens and labels as `check_vocabulary` does."""
    for key in (TOKENS, LABELS):
        if key in sample:
            check_vocabulary(key, sample[key].long(), vocabulary, what=what, name=name)


def pad_samples(samples: Sequence[Sample], pad_token: int) -> dict[str, Tensor]:
    """Return a batch of one or more samples, as long as the longest."""
    samples = [_complete(sample) for sample in samples]
    fill = {TOKENS: pad_token, LABELS: IGNORED}
    return {
        key: _padded([sample[key] for sample in samples], fill.get(key, 0)) for key in samples[0]
    }


def make_longest_batch(sample: Sample, count: int, longest: int) -> dict[str, Tensor]:
    """Return a batch of `count` samples like `sample`, at the maximum length. The mask hides a
    token, since attention without padding may take another, cheaper path."""
    first = _complete(sample)
    length = len(first[TOKENS])
    tiled = torch.arange(longest) % length
    batch = {
        key: (value[tiled] if value.dim() and len(value) == length else value)
        .unsqueeze(0)
        .repeat(count, *[1] * max(1, value.dim()))
        for key, value in first.items()
    }
    batch[MASK][-1:, -1] = 0
    return batch


def truncate_sample(
    sample: Mapping[str, Tensor], longest: int, *, own: Collection[str] = ()
) -> Sample:
    """Return the first `longest` tokens of a sample, without tokens hidden by its mask, and
    likewise all values as long as the tokens.

    Args:
        own: keys of values with lengths of their own, which may equal the number of tokens by
            chance.
    """
    length = len(sample[TOKENS])
    seen: Any = slice(None)
    if MASK in sample:
        seen = sample[MASK] != 0
    return {
        key: value[seen][:longest]
        if key not in own and value.dim() and len(value) == length
        else value
        for key, value in sample.items()
        if key != MASK
    }


def get_declared_lengths(dataset: Any, count: int, name: str) -> np.ndarray | None:
    """Return the sample lengths declared by a dataset: the attribute `lengths`, or the column
    `length`.

    Raises:
        InputError: they are no lengths of `count` samples.
    """
    told = getattr(dataset, "lengths", None)
    if told is None and "length" in (getattr(dataset, "column_names", None) or ()):
        told = dataset["length"]
    if told is None:
        return None
    wrong = ""
    try:
        lengths = np.asarray(told)
    except ValueError:  # a list of lists of different lengths
        wrong = f"a {type(told).__name__} that is no list of numbers"
    else:
        if lengths.shape != (count,):
            wrong = f"a {type(told).__name__} with the shape {list(lengths.shape)}"
        elif lengths.dtype.kind not in "iu":
            wrong = f"of the type {lengths.dtype}"
        elif lengths.min() < 1:
            wrong = f"{lengths.min()} for sample {lengths.argmin()}"
    if wrong:
        raise InputError(
            f"the lengths of the dataset's {count} samples are {wrong}",
            code="sample-lengths-invalid",
            where=name,
            fix="give one integer of 1 or more for each sample: how many tokens it has",
        )
    return lengths.astype(np.int32)


def require_lengths(source: Source, what: str, instead: str) -> np.ndarray:
    """Return the lengths of a source's samples; raise an InputError if unknown."""
    if source.lengths is None:
        raise InputError(
            f"{what} needs to know how long samples are, and the dataset does not say",
            code="sample-lengths-unknown",
            where=source.name,
            fix="give it an attribute `lengths` (or a column `length`): the number of tokens of "
            f"each sample; or {instead}",
        )
    return source.lengths


def _complete(sample: Sample) -> Sample:
    """Add mask and labels to a sample."""
    tokens = sample[TOKENS].long()
    labels = sample.get(LABELS, tokens)
    return {**sample, TOKENS: tokens, LABELS: labels.long(), MASK: torch.ones_like(tokens)}


def _padded(values: Sequence[Tensor], fill: int) -> Tensor:
    if not values[0].dim():
        return torch.stack(list(values))
    return pad_sequence(list(values), batch_first=True, padding_value=fill)
