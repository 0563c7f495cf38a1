"""Texts of a dataset, tokenized while read: no token file is written.

All texts requested at once go through one call of the tokenizer, which uses all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gpumix.data.core.read_policy import DEFAULT_READING, Reading
from gpumix.data.core.source import hash_parts
from gpumix.data.core.tokenizer import Tokenizer
from gpumix.data.sources.map_style import MapStyle
from gpumix.data.workers.fetch import find_readable
from gpumix.data.workers.padding import TOKENS, RaggedSource, Sample
from gpumix.schema.errors import InputError

_TEXTS_PER_CALL = 2000  # texts per call, to measure all


class TokenizedTexts(RaggedSource):
    """A map-style dataset of texts: strings, or dictionaries with a string in `column`.

    A sample is a text's tokens followed by end-of-text, cut to `longest`.

    Args:
        name: name of the dataset in errors.
        content: changes with the texts; empty if unknown.
        reading: whether another text may represent all if the first is bad.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Tokenizer,
        *,
        column: str,
        longest: int,
        name: str,
        content: str,
        reading: Reading = DEFAULT_READING,
    ) -> None:
        super().__init__(longest=longest, pad_token=tokenizer.end_of_text)
        self._dataset = MapStyle(dataset, name)
        self._tokenizer = tokenizer
        self._column = column
        self.name = name
        self._content = content
        self._lengths: np.ndarray | None = None
        self.template = find_readable(self._texts, len(self), name, reading)

    def set_lengths(self, lengths: np.ndarray | None) -> None:
        """Set the lengths of samples before cutting; None: unknown."""
        self._lengths = None if lengths is None else np.minimum(lengths, self.longest)

    @property
    def has_content_fingerprint(self) -> bool:
        """True if the fingerprint identifies the texts themselves."""
        return bool(self._content)

    @property
    def draws(self) -> bool:
        return self._dataset.draws

    @property
    def fingerprint(self) -> str:
        content = self._content or self.name
        return hash_parts(content, len(self), self._tokenizer.fingerprint, self.longest)

    @property
    def lengths(self) -> np.ndarray | None:
        return self._lengths

    def __len__(self) -> int:
        return len(self._dataset)

    def samples(self, indices: np.ndarray) -> list[Sample]:
        found = tokenize_texts(self._texts(indices), self._tokenizer)
        return [{TOKENS: torch.from_numpy(tokens[: self.longest])} for tokens in found]

    def count_tokens(self, progress: Callable[[], None]) -> np.ndarray:
        """Return the tokens of each sample; tokenizes all texts once, and calls `progress` in
        between."""
        found: list[int] = []
        for first in range(0, len(self), _TEXTS_PER_CALL):
            run = np.arange(first, min(first + _TEXTS_PER_CALL, len(self)))
            found += [len(sample[TOKENS]) for sample in self.samples(run)]
            progress()
        return np.array(found, dtype=np.int32)

    def _texts(self, indices: np.ndarray) -> Sequence[str]:
        numbers = indices.tolist()
        samples = zip(numbers, self._dataset.fetch(numbers), strict=True)
        return [get_text(row, self._column, f"sample {k}", self.name) for k, row in samples]


def get_text(row: Any, column: str, what: str, name: str) -> str:
    """Return the text of a sample.

    Args:
        what: name of the sample, `name` of the dataset, in errors.

    Raises:
        InputError: the sample has no text.
    """
    text = row.get(column) if isinstance(row, Mapping) else row
    if not isinstance(text, str):
        has = f"it is a {type(row).__name__}"
        columns = []
        if isinstance(row, Mapping):
            has = f"it has {', '.join(map(repr, row))}"
            columns = [key for key, value in row.items() if isinstance(value, str)]
            if column in row:
                has = f"that is a {type(text).__name__}"
        raise InputError(
            f"{what} should be a text, or a dictionary with one in '{column}'; {has}",
            code="sample-not-text",
            where=name,
            fix=f"--set data.column={columns[0]}"
            if columns
            else "drop such samples, or leave out `tokenize: on-the-fly`",
        )
    return text


def tokenize_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the tokens of each text, followed by end-of-text: int64."""
    encoded = tokenizer.encode_batch(texts)
    return [np.append(one.astype(np.int64), tokenizer.end_of_text) for one in encoded]
