"""Samples of different lengths from a dataset: dictionaries of `input_ids` and per-token values."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from gpumix.data.core.read_policy import DEFAULT_READING, Reading
from gpumix.data.core.source import hash_parts
from gpumix.data.sources.map_style import SampleSource
from gpumix.data.workers.fetch import find_readable
from gpumix.data.workers.padding import (
    DECODER_KEYS,
    IGNORED,
    LABELS,
    MASK,
    PER_TOKEN_KEYS,
    TOKENS,
    RaggedSource,
    Sample,
    get_declared_lengths,
    truncate_sample,
)
from gpumix.schema.errors import InputError


class OwnSamples(RaggedSource):
    """A map-style dataset whose samples have `input_ids` of any length; longer samples are cut.

    Tokens hidden by a sample's own `attention_mask` are left out, along with all per-token values:
    values as long as the tokens, in the first readable sample too. Lengths of samples are known if
    the dataset has an attribute `lengths` or a column `length`.

    Args:
        dataset: as for `SampleSource`.
        name: name of the dataset in errors.
        pad_token: token for padding.
        content: changes with the samples; default: the name.
        aligned: whether labels correspond to tokens one to one; labels of a decoder do not.
        reading: see `SampleSource`.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        longest: int,
        pad_token: int = 0,
        content: str = "",
        aligned: bool = True,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        super().__init__(longest=longest, pad_token=pad_token)
        self._aligned = aligned
        self._source = SampleSource(dataset, name, reading=reading)
        self.name = name
        lengths = get_declared_lengths(dataset, len(self._source), name)
        self._lengths = None if lengths is None else np.minimum(lengths, longest)
        told = b"" if self._lengths is None else self._lengths.tobytes()
        whole = hashlib.sha256(told).hexdigest()
        first = self._source.first
        tokens = first.get(TOKENS)
        self._own = set() if aligned else set(DECODER_KEYS)
        if tokens is not None and tokens.dim():  # otherwise reported below
            length = tokens.shape[:1]
            self._own |= {
                key
                for key, value in first.items()
                if key not in PER_TOKEN_KEYS and value.shape[:1] != length
            }
        self._mark = hash_parts(content or name, len(self._source), longest, whole)
        self.template = find_readable(self.samples, len(self), name, reading)

    @property
    def draws(self) -> bool:
        return self._source.draws

    @property
    def fingerprint(self) -> str:
        return self._mark

    @property
    def lengths(self) -> np.ndarray | None:
        return self._lengths

    def __len__(self) -> int:
        return len(self._source)

    def samples(self, indices: np.ndarray) -> list[Sample]:
        found = self._source.samples(indices)
        for index, sample in zip(indices.tolist(), found, strict=True):
            check_tokens(sample, f"sample {index}", self.name, aligned=self._aligned)
        return [truncate_sample(sample, self.longest, own=self._own) for sample in found]


def check_tokens(sample: Sample, what: str, name: str, *, aligned: bool) -> None:
    """Check the tokens of a sample and all values per token.

    Args:
        what: name of the sample, `name` of the dataset, in errors.
        aligned: see `OwnSamples`.

    Raises:
        InputError: tokens are missing, or values do not correspond to tokens.
    """
    tokens, labels = sample.get(TOKENS), sample.get(LABELS)
    if tokens is None or tokens.dim() != 1 or tokens.is_floating_point() or not len(tokens):
        has = "none" if tokens is None else f"{tokens.dtype}{list(tokens.shape)}"
        raise InputError(
            f"{what} needs '{TOKENS}', a list of one or more tokens; it has {has}",
            code="sample-without-tokens",
            where=name,
            fix="drop empty samples; data.packing other than concatenate is for tokens",
        )
    if labels is not None and labels.is_floating_point():
        raise InputError(
            f"'{LABELS}' of {what} are {labels.dtype}, not whole numbers",
            code="labels-not-integers",
            where=name,
            fix="data.packing other than concatenate is for tokens: give int64",
        )
    for key in (MASK, LABELS) if aligned else (MASK,):
        value = sample.get(key, tokens)
        if value.shape != tokens.shape:
            raise InputError(
                f"{what} has {len(tokens)} {TOKENS}, and '{key}' of the shape {list(value.shape)}",
                code="sample-length-mismatch",
                where=name,
                why="each belongs to a token",
                fix=f"make them as long as {TOKENS}"
                + (f", {IGNORED} where nothing is to be learnt" if key == LABELS else ""),
            )
