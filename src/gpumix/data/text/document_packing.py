"""Packing of whole documents, isolated from each other, into samples of fixed length.

Packs are the samples, so their content does not depend on plan, ranks or workers. Models of
`transformers` find the documents by `position_ids`, which restart with each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpumix.data.core import sample_rng
from gpumix.data.core.read_policy import Skipped, notes, record_skipped_part
from gpumix.data.core.source import Source, hash_parts
from gpumix.data.text.first_fit import WINDOW_DOCUMENTS, PackAssignment, pack_first_fit
from gpumix.data.workers.fetch import FAILURES, catch_read_error, first_line_of, make_read_error
from gpumix.data.workers.padding import (
    IGNORED,
    LABELS,
    TOKENS,
    RaggedSource,
    Sample,
    require_lengths,
)
from gpumix.schema.errors import InputError

POSITION_IDS = "position_ids"


@dataclass(frozen=True)
class Packer:
    """A builder of samples of `longest` tokens from documents that fit.

    Attributes:
        predicts_next: whether labels are compared with outputs one token earlier. If so, labels of
            first tokens are ignored, which would be predicted from another document.
    """

    longest: int
    pad_token: int
    predicts_next: bool

    def filled(self, documents: Sequence[Sample]) -> Sample:
        """Return one pack of the documents."""
        used = sum(len(document[TOKENS]) for document in documents)
        padding = self._padding(documents[0], self.longest - used)
        parts = [*(self._alone(document) for document in documents), padding]
        return {key: torch.cat([part[key] for part in parts]) for key in padding}

    def _alone(self, document: Sample) -> Sample:
        """Return a document with positions and labels independent of preceding documents."""
        tokens = document[TOKENS]
        labels = document.get(LABELS, tokens).long().clone()
        if self.predicts_next:
            labels[0] = IGNORED
        return {**document, LABELS: labels, POSITION_IDS: torch.arange(len(tokens))}

    def _padding(self, like: Sample, length: int) -> Sample:
        beside = {key: value.new_zeros((length, *value.shape[1:])) for key, value in like.items()}
        return {
            **beside,
            TOKENS: like[TOKENS].new_full((length,), self.pad_token),
            LABELS: torch.full((length,), IGNORED),
            POSITION_IDS: torch.arange(length),
        }


class PackedDocuments(Source):
    """The samples of `documents` in packs of `documents.longest` tokens: `input_ids`, `labels`,
    `position_ids` and further per-token values, int64[k, L].

    The rest of a pack is padding, a document of its own with ignored labels. If bad samples are
    skipped, a pack leaves out unreadable documents; a pack without readable documents is replaced
    by another.

    Args:
        documents: documents to pack.
        seed: seed of the order in which documents reach the packing windows.
        predicts_next: see `Packer`.

    Raises:
        InputError: the lengths of the documents are unknown.
    """

    def __init__(
        self,
        documents: RaggedSource,
        *,
        seed: int,
        predicts_next: bool,
        window: int = WINDOW_DOCUMENTS,
    ) -> None:
        self.name = documents.name
        self._documents = documents
        self._packer = Packer(documents.longest, documents.pad_token, predicts_next)
        self._lengths = require_lengths(documents, "packing", "--set data.packing=none")
        self._packs: PackAssignment = pack_first_fit(
            self._lengths, documents.longest, seed=seed, window=window
        )
        self._mark = hash_parts(documents.fingerprint, documents.longest, "packed", seed, window)

    @property
    def draws(self) -> bool:
        return self._documents.draws

    @property
    def fingerprint(self) -> str:
        return self._mark

    @property
    def filled(self) -> float:
        """The fraction of the packs' tokens that is not padding."""
        return float(self._lengths.sum(dtype=np.int64) / (len(self) * self._documents.longest))

    def documents_in(self, pack: int) -> np.ndarray:
        """Return the numbers of the documents in a pack."""
        return self._packs.of(pack)

    def __len__(self) -> int:
        return len(self._packs)

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        # With no packs requested, a document gives keys and dtypes.
        packs = [self.documents_in(int(k)) for k in indices]
        packs = packs or [np.array([self._documents.template])]
        rows = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
        with sample_rng.use_part_seeds(rows.tolist()):
            documents = self._read(np.concatenate(packs), rows, may_lack=len(indices) > 0)
        filled = [self._packer.filled(pack) for pack in documents]
        return {
            key: torch.stack([pack[key] for pack in filled])[: len(indices)] for key in filled[0]
        }

    def _read(self, numbers: np.ndarray, rows: np.ndarray, *, may_lack: bool) -> list[list[Sample]]:
        """Return the documents of each row. Errors name the unreadable document, since packs are
        numbered differently; if allowed, a row with documents left skips it instead."""
        caught = FAILURES if notes.skips else (Exception, SystemExit)
        try:
            documents = self._read_documents(numbers)
        except caught:
            bad = self._bad(numbers)
            for place, problem in bad.items():
                if not (may_lack and notes.skips):
                    raise make_read_error(self.name, int(numbers[place]), problem) from problem
                why = first_line_of(problem)
                record_skipped_part(int(rows[place]), Skipped(int(numbers[place]), None, why))
            good = [place for place in range(len(numbers)) if place not in bad]
            for place, problem in bad.items():
                if rows[place] not in rows[good]:
                    raise make_read_error(self.name, int(numbers[place]), problem) from problem
            rows = rows[good]
            with sample_rng.use_part_seeds(good):
                documents = self._read_documents(numbers[good])  # errors that do not recur are over
        found: list[list[Sample]] = [[] for _ in range(rows[-1] + 1)]
        for row, document in zip(rows.tolist(), documents, strict=True):
            found[row].append(document)
        return found

    def _bad(self, numbers: np.ndarray) -> dict[int, BaseException]:
        """Return the errors of unreadable documents, by place in `numbers`."""
        found = {}
        for place, number in enumerate(numbers.tolist()):
            with sample_rng.use_part_seeds([place]):
                problem = catch_read_error(self._read_documents, number)
            if problem is not None:
                found[place] = problem
                if not notes.skips:
                    break
        return found

    def _read_documents(self, numbers: np.ndarray) -> list[Sample]:
        """Return the documents; check lengths against the declared ones."""
        documents = self._documents.samples(numbers)
        for number, document in zip(numbers.tolist(), documents, strict=True):
            shapes = {key: value.shape[:1] for key, value in document.items()}
            told = int(self._lengths[number])
            if any(shape != (told,) for shape in shapes.values()):
                lengths = ", ".join(f"{len(document[key])} {key}" for key in shapes if shapes[key])
                raise InputError(
                    f"sample {number} is packed as {told} tokens, and has {lengths}",
                    code="packed-length-wrong",
                    where="data",
                    why="all that a packed sample holds goes by its tokens, as many as its length "
                    "says",
                    fix="correct the dataset's lengths",
                )
        return documents
