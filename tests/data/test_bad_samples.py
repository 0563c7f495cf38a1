"""Samples that cannot be read: each is named, or left out, wherever samples are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpumix.data.fetch import BadSamples, fetch
from gpumix.data.on_the_fly import TokenizedTexts
from gpumix.data.own_samples import OwnSamples
from gpumix.data.packing import PackedDocuments
from gpumix.data.rows import Source
from gpumix.data.samples import as_source
from gpumix.data.tokenizer import ByteTokenizer
from gpumix.spec.errors import InputError, TrainingError

NONE = np.empty(0, dtype=np.int64)


class Damaged:
    """Sample k has three tokens k; those in `bad` cannot be read."""

    def __init__(self, n: int, *bad: int, text: bool = False) -> None:
        self.lengths = np.full(n, 3)
        self.bad, self.text = bad, text

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, k: int) -> Any:
        if k in self.bad:
            raise OSError("a bad sector")
        return chr(k) * 2 if self.text else {"input_ids": [k] * 3}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([sample["input_ids"] for sample in samples])}


def own(dataset: Damaged, how: BadSamples) -> OwnSamples:
    return OwnSamples(dataset, "mine", longest=4, bad_samples=how)


def texts(dataset: Damaged, how: BadSamples) -> TokenizedTexts:
    dataset.text = True
    return TokenizedTexts(
        dataset,
        ByteTokenizer(),
        column="text",
        longest=4,
        name="mine",
        content="",
        bad_samples=how,
    )


SOURCES: dict[str, Callable[[Damaged, BadSamples], Source]] = {
    "stacked": lambda dataset, how: as_source(dataset, bad_samples=how),
    "collated": lambda dataset, how: as_source(dataset, collate, bad_samples=how),
    "of unlike length": own,
    "texts": texts,
    "packed": lambda dataset, how: PackedDocuments(own(dataset, how), seed=0, predicts_next=True),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_another_sample_tells_what_all_are_like_where_the_first_is_bad(kind):
    source = SOURCES[kind](Damaged(12, 0, 1, 2), "skip")
    whole = SOURCES[kind](Damaged(12), "stop")
    empty, like = source.rows(NONE), whole.rows(NONE)
    assert {k: (v.dtype, v.shape) for k, v in empty.items()} == {
        k: (v.dtype, v.shape) for k, v in like.items()
    }
    assert source.fingerprint == whole.fingerprint
    batch, skipped = fetch(source, np.arange(6), "skip", specimen=True)
    assert len(batch["input_ids"]) == 6
    tokens = whole.specimen(np.arange(6))["input_ids"]
    assert batch["input_ids"].shape == tokens.shape
    assert {one.index for one in skipped} <= set(range(6))


@pytest.mark.parametrize("kind", SOURCES)
def test_a_first_sample_that_is_bad_is_named(kind):
    with pytest.raises(
        TrainingError, match=r"sample 0 of .* cannot be read: OSError: a bad sector"
    ):
        SOURCES[kind](Damaged(12, 0), "stop")


@pytest.mark.parametrize("kind", SOURCES)
def test_where_all_are_bad_the_first_is_named(kind):
    with pytest.raises(
        TrainingError, match=r"sample 0 of .* cannot be read: OSError: a bad sector"
    ):
        SOURCES[kind](Damaged(12, *range(12)), "skip")


def test_a_dataset_that_cannot_be_counted_is_told():
    class Away(Damaged):
        def __len__(self) -> int:
            raise OSError("the disk is gone")

    with pytest.raises(InputError, match="does not say how many samples it has: OSError: the disk"):
        as_source(Away(3))
