"""A dataset's own samples of unlike length: dictionaries of `input_ids` and what goes with them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from gpumix.data.fetch import readable
from gpumix.data.ragged import (
    IGNORED,
    LABELS,
    MASK,
    OF_DECODER,
    PER_TOKEN,
    TOKENS,
    Ragged,
    Sample,
    cut_to,
    declared_lengths,
)
from gpumix.data.reading import AS_USUAL, Reading
from gpumix.data.rows import digest
from gpumix.data.samples import SampleSource
from gpumix.spec.errors import InputError


class OwnSamples(Ragged):
    """A map-style dataset whose samples have `input_ids` of any length; longer ones are cut.

    Tokens that a sample's own `attention_mask` hides are left out, with what belongs to them: all
    that has as many as there are tokens, also in the first sample that can be read. How long
    samples are is known if the dataset says so, in an attribute `lengths` or a column `length`.

    Args:
        dataset: as for `SampleSource`.
        name: what to call it in errors.
        pad_token: what samples are padded with.
        lengths: of the samples before they are cut; default: what the dataset says.
        content: changes when the samples do; default: the name.
        aligned: whether labels belong to tokens, one to each; those of a decoder do not.
        reading: see `SampleSource`.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        longest: int,
        pad_token: int = 0,
        lengths: np.ndarray | None = None,
        content: str = "",
        aligned: bool = True,
        reading: Reading = AS_USUAL,
    ) -> None:
        super().__init__(longest=longest, pad_token=pad_token)
        self._aligned = aligned
        self._source = SampleSource(dataset, name, reading=reading)
        self.name = name
        if lengths is None:
            lengths = declared_lengths(dataset, len(self._source), name)
        self._lengths = None if lengths is None else np.minimum(lengths, longest)
        told = b"" if self._lengths is None else self._lengths.tobytes()
        whole = hashlib.sha256(told).hexdigest()
        first = self._source.first
        tokens = first.get(TOKENS)
        self._own = set() if aligned else set(OF_DECODER)
        if tokens is not None and tokens.dim():  # else it is told below
            length = tokens.shape[:1]
            self._own |= {
                key
                for key, value in first.items()
                if key not in PER_TOKEN and value.shape[:1] != length
            }
        self._mark = digest(content or name, len(self._source), longest, whole)
        self.template = readable(
            lambda index: self.samples(np.array([index])), len(self), name, reading
        )

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
        return [cut_to(sample, self.longest, own=self._own) for sample in found]


def check_tokens(sample: Sample, what: str, name: str, *, aligned: bool) -> None:
    """
    Args:
        what: to call the sample, `name` the dataset, in errors.
        aligned: see `OwnSamples`.

    Raises:
        InputError: it has no tokens, or not what belongs to each.
    """
    tokens, labels = sample.get(TOKENS), sample.get(LABELS)
    if tokens is None or tokens.dim() != 1 or tokens.is_floating_point() or not len(tokens):
        has = "none" if tokens is None else f"{tokens.dtype}{list(tokens.shape)}"
        raise InputError(
            f"{what} needs '{TOKENS}', a list of one or more tokens; it has {has}",
            where=name,
            fix="drop empty samples; data.packing other than concatenate is for tokens",
        )
    if labels is not None and labels.is_floating_point():
        raise InputError(
            f"'{LABELS}' of {what} are {labels.dtype}, not whole numbers",
            where=name,
            fix="data.packing other than concatenate is for tokens: give int64",
        )
    for key in (MASK, LABELS) if aligned else (MASK,):
        value = sample.get(key, tokens)
        if value.shape != tokens.shape:
            raise InputError(
                f"{what} has {len(tokens)} {TOKENS}, and '{key}' of the shape {list(value.shape)}",
                where=name,
                why="each belongs to a token",
                fix=f"make them as long as {TOKENS}"
                + (f", {IGNORED} where nothing is to be learnt" if key == LABELS else ""),
            )
