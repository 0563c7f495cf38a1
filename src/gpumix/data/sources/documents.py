"""Documents of a token file as samples; longer documents are cut into several."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from gpumix.data.core.source import hash_parts
from gpumix.data.core.token_file import PackedText
from gpumix.data.workers.padding import TOKENS, RaggedSource, Sample
from gpumix.schema.errors import InputError


class TokenFileDocuments(RaggedSource):
    """Documents in file order, cut into parts of at most `longest` tokens; the last part may be
    shorter. A part of a single token is left out: it has nothing to predict.

    Raises:
        InputError: no document has two tokens.
    """

    name = "the text"

    def __init__(self, text: PackedText, *, pad_token: int) -> None:
        super().__init__(longest=text.sequence_length, pad_token=pad_token)
        self._text = text
        ends = np.asarray(text.ends)
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        counts = -(-(ends - begins) // self.longest)
        # Number of each part within its document.
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._begins = np.repeat(begins, counts) + places * self.longest
        lengths = np.minimum(np.repeat(ends, counts) - self._begins, self.longest)
        worth = lengths > 1
        if not worth.any():
            raise InputError(
                "no document has a token to predict from another",
                code="no-document-with-target",
                where="data",
            )
        self._begins, self._lengths = self._begins[worth], lengths[worth].astype(np.int32)
        cuts = hashlib.sha256(self._begins.tobytes() + self._lengths.tobytes()).hexdigest()
        self._mark = hash_parts(text.sha256, cuts)

    @property
    def fingerprint(self) -> str:
        return self._mark

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def samples(self, indices: np.ndarray) -> list[Sample]:
        spans = zip(self._begins[indices].tolist(), self._lengths[indices].tolist(), strict=True)
        return [
            {TOKENS: torch.from_numpy(self._text.stream[begin : begin + length].astype(np.int64))}
            for begin, length in spans
        ]
