"""Documents of a stream: tokenized while read, and padded or packed.

Packs are made window by window, of documents in order of arrival, by each reader. So a pack depends
on the stream, its lanes and the seed, and on no plan, rank or worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from gpumix.data.core.read_policy import DEFAULT_READING, Reading, Skipped, note_sample_begin
from gpumix.data.core.sample_rng import derive_key
from gpumix.data.core.source import hash_parts, sort_keys
from gpumix.data.core.tokenizer import Tokenizer
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.sources.iterable import StreamPack, StreamProcessing
from gpumix.data.sources.map_style import tensors_of
from gpumix.data.sources.pretokenized import check_tokens
from gpumix.data.sources.tokenize_on_read import get_text, tokenize_texts
from gpumix.data.text.document_packing import Packer
from gpumix.data.text.first_fit import pack_first_fit
from gpumix.data.workers.padding import (
    DECODER_KEYS,
    TOKENS,
    Sample,
    check_document,
    make_longest_batch,
    pad_samples,
    truncate_sample,
)
from gpumix.schema.errors import InputError, get_first_line

WINDOW = 1024  # documents packed together, in all lanes of a stream
LEAST_WINDOW = 64  # documents per lane, at least
TEXTS_PER_CALL = 64  # texts tokenized by one call


@dataclass(frozen=True)
class TextConversion:
    """Conversion of texts into documents: strings, or dictionaries with a string in `column`.

    Attributes:
        tokenizer: end-of-text follows each document.
        of_decoder: keys of values with lengths of their own, independent of the tokens.
        mark: a digest that changes with the documents.
    """

    tokenizer: Tokenizer
    column: str
    of_decoder = ()

    @property
    def pad_token(self) -> int:
        return self.tokenizer.end_of_text

    @property
    def mark(self) -> str:
        return hash_parts(self.tokenizer.fingerprint, self.column)

    def checked(self, given: Any, what: str, name: str) -> Any:
        """Return the sample, checked; raise an InputError if it is no document."""
        return get_text(given, self.column, what, name)

    def documents(self, given: Sequence[str]) -> list[Sample]:
        """Return the documents of checked samples, at full length."""
        found = tokenize_texts(given, self.tokenizer)
        return [{TOKENS: torch.from_numpy(tokens)} for tokens in found]

    def parts(self, document: Sample, longest: int) -> list[Sample]:
        """Return the parts of a document to be packed, without single tokens, which have nothing to
        predict."""
        return [{TOKENS: part} for part in document[TOKENS].split(longest) if len(part) > 1]


@dataclass(frozen=True)
class TokenConversion:
    """Conversion of dictionaries of `input_ids` and per-token values into documents.

    Attributes:
        aligned: whether labels correspond to tokens one to one; labels of a decoder do not.
    """

    aligned: bool
    pad_token: int = 0
    mark: str = "tokens"

    @property
    def of_decoder(self) -> Collection[str]:
        return () if self.aligned else DECODER_KEYS

    def checked(self, given: Any, what: str, name: str) -> Any:
        sample = tensors_of(given, what, name)
        check_tokens(sample, what, name, aligned=self.aligned)
        return sample

    def documents(self, given: Sequence[Sample]) -> list[Sample]:
        return list(given)

    def parts(self, document: Sample, longest: int) -> list[Sample]:
        """Return the first tokens only: further values of a sample may belong together."""
        part = truncate_sample(document, longest, own=self.of_decoder)
        return [part] if len(part[TOKENS]) else []


SampleConversion = TextConversion | TokenConversion


@dataclass(frozen=True)
class StreamDocuments:
    """The documents of a stream.

    Attributes:
        name: name of the stream in errors.
        kind: conversion of its samples.
        longest: tokens of a sample.
        reading: whether invalid documents are skipped.
        vocabulary: vocabulary of the model, to check all that is packed; None: checked later.
    """

    name: str
    kind: SampleConversion
    longest: int
    reading: Reading = DEFAULT_READING
    vocabulary: int | None = None

    def padded(self) -> StreamProcessing:
        """Return the form with a sample per document, padded to the longest of its batch. Each
        worker converts only its own samples."""
        return StreamProcessing(
            transform=self._sample,
            collate=partial(pad_samples, pad_token=self.kind.pad_token),
            specimen=partial(make_longest_batch, longest=self.longest),
            mark=hash_parts("padded", self.longest, self.kind.mark),
        )

    def packed(self, *, seed: int, predicts_next: bool) -> StreamProcessing:
        """Return the form with whole documents in packs of `longest` tokens: first-fit in each
        window of documents, and the packs of a window in a keyed order.

        Documents of a window's emptiest pack go into the next window, so only the last pack of a
        pass may be poorly filled.

        Args:
            predicts_next: see `Packer`.
        """
        packer = Packer(self.longest, self.kind.pad_token, predicts_next)
        return StreamProcessing(
            repack=partial(self._packs, packer=packer, seed=seed),
            mark=hash_parts("packed", self.longest, self.kind.mark, seed, WINDOW, LEAST_WINDOW),
        )

    # -- inside ------------------------------------------------------------------------------------

    def _sample(self, given: Any) -> Sample:
        document = self.kind.documents([self.kind.checked(given, "a sample", self.name)])[0]
        return truncate_sample(document, self.longest, own=self.kind.of_decoder)

    def _packs(
        self,
        given: Iterator[Any],
        lanes: int,
        place: tuple[int, int],
        *,
        packer: Packer,
        seed: int,
    ) -> Iterator[StreamPack]:
        bad: list[Skipped] = []
        documents = self._documents(given, bad)
        window, number = max(LEAST_WINDOW, WINDOW // lanes), 0
        left: list[Sample] = []  # from the emptiest pack, for the next window
        while fresh := list(islice(documents, window)):
            key = derive_key(f"gpumix packs {seed} {place} {number}")
            packs = _pack_window(left + fresh, self.longest, key)
            left = packs.pop(min(range(len(packs)), key=lambda k: _tokens(packs[k])))
            for k in GlobalOrder(len(packs), key).span(0, len(packs)) if packs else ():
                yield _make_pack(packer, packs[k], bad)
            number += 1
        if left:
            yield _make_pack(packer, left, bad)

    def _documents(self, given: Iterator[Any], bad: list[Skipped]) -> Iterator[Sample]:
        """Yield the documents to pack, in the order of the stream; add skipped documents to
        `bad`."""
        keys: set[str] | None = None
        good = self._good(given, bad)
        while some := list(islice(good, TEXTS_PER_CALL)):
            for document in self.kind.documents(some):
                keys = keys or set(document)
                if set(document) != keys:
                    raise InputError(
                        f"a document holds {sort_keys(document)}, those before it "
                        f"{sort_keys(keys)}",
                        code="document-keys-differ",
                        where=self.name,
                        fix="let all samples have the same keys",
                    )
                yield from self.kind.parts(document, self.longest)

    def _good(self, given: Iterator[Any], bad: list[Skipped]) -> Iterator[Any]:
        for number, one in enumerate(given):
            note_sample_begin(
                number + 1, self.name
            )  # the timeout is for each, not for a window of them
            what = f"document {number}"
            try:
                checked = self.kind.checked(one, what, self.name)
                self._check_known(checked, what)
            except InputError as error:
                if self.reading.bad_samples == "stop":
                    raise
                bad.append(Skipped(number, None, get_first_line(error)))
            else:
                yield checked

    def _check_known(self, checked: Any, what: str) -> None:
        if self.vocabulary is None:
            return
        for document in self.kind.documents([checked]):
            for part in self.kind.parts(document, self.longest):
                check_document(part, self.vocabulary, what, self.name)


def _make_pack(packer: Packer, documents: Sequence[Sample], bad: list[Skipped]) -> StreamPack:
    """Return a pack, with the documents skipped since the previous pack."""
    skipped = tuple(bad)
    bad.clear()
    return StreamPack(packer.filled(documents), skipped)


def _tokens(documents: Sequence[Sample]) -> int:
    return sum(len(document[TOKENS]) for document in documents)


def _pack_window(documents: Sequence[Sample], longest: int, key: int) -> list[list[Sample]]:
    lengths = np.array([len(document[TOKENS]) for document in documents])
    packs = pack_first_fit(lengths, longest, seed=key, window=len(documents))
    return [[documents[k] for k in packs.of(pack)] for pack in range(len(packs))]
