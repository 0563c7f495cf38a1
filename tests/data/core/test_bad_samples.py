"""Samples that cannot be read: each is named, or left out, wherever samples are read."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpumix.data.core.read_policy import (
    DEFAULT_READING,
    BadSamples,
    Reading,
    Skipped,
    StuckError,
    run_with_timeout,
)
from gpumix.data.core.sample_rng import sample_generator
from gpumix.data.core.source import Source, split_held_out
from gpumix.data.core.tokenizer import ByteTokenizer
from gpumix.data.loader import Loader, evaluation_batches
from gpumix.data.sources.iterable import StreamProcessing, StreamSource
from gpumix.data.sources.map_style import as_source
from gpumix.data.sources.pretokenized import OwnSamples
from gpumix.data.sources.tokenize_on_read import TokenizedTexts
from gpumix.data.text.document_packing import PackedDocuments
from gpumix.data.workers.fetch import fetch, fetch_with_timeout
from gpumix.schema.errors import InputError, TrainingError
from helpers.errors import raises
from helpers.extended import left_out

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
    return OwnSamples(dataset, "mine", longest=4, reading=Reading(how))


def texts(dataset: Damaged, how: BadSamples) -> TokenizedTexts:
    dataset.text = True
    return TokenizedTexts(
        dataset,
        ByteTokenizer(),
        column="text",
        longest=4,
        name="mine",
        content="",
        reading=Reading(how),
    )


SOURCES: dict[str, Callable[[Damaged, BadSamples], Source]] = {
    "stacked": lambda dataset, how: as_source(dataset, reading=Reading(how)),
    "collated": lambda dataset, how: as_source(dataset, collate, reading=Reading(how)),
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
    with raises(TrainingError, code="sample-unreadable", what=(0, "OSError: a bad sector")):
        SOURCES[kind](Damaged(12, 0), "stop")


@pytest.mark.parametrize("kind", SOURCES)
def test_where_all_are_bad_the_first_is_named(kind):
    told = {"code": "sample-irreplaceable", "what": (0, 8), "why": "OSError: a bad sector"}
    with raises(TrainingError, **told):
        SOURCES[kind](Damaged(12, *range(12)), "skip")


def test_a_dataset_that_cannot_be_counted_is_told():
    class Away(Damaged):
        def __len__(self) -> int:
            raise OSError("the disk is gone")

    with raises(InputError, code="dataset-length-unreadable", what="OSError: the disk"):
        as_source(Away(3))


def test_a_bad_sample_has_the_number_that_the_dataset_knows():
    """Not that among those that are held out, or of the pack that it is in."""
    _, held_out = split_held_out(as_source(Damaged(12, 10)), 0.25)
    with raises(TrainingError, code="sample-unreadable", what=10):
        fetch(held_out, np.arange(3), "stop")
    packed = PackedDocuments(own(Damaged(12, 7), "stop"), seed=0, predicts_next=True)
    with raises(TrainingError, code="sample-unreadable", what=7):
        fetch(packed, np.arange(len(packed)), "stop")


# -- documents in packs ----------------------------------------------------------------------------


class Dealt(Damaged):
    """Document k has one to five tokens k + 1, and draws a number for each."""

    def __init__(self, n: int, *bad: int) -> None:
        super().__init__(n, *bad)
        self.lengths = 1 + np.arange(n) * 7 % 5

    def __getitem__(self, k: int) -> Any:
        super().__getitem__(k)
        drawn = torch.rand(int(self.lengths[k]), generator=sample_generator())
        return {"input_ids": [k + 1] * len(drawn), "drawn": drawn}


def packs_of(dataset: Any, longest: int = 8) -> PackedDocuments:
    documents = OwnSamples(dataset, "mine", longest=longest, reading=Reading("skip"))
    return PackedDocuments(documents, seed=0, predicts_next=True)


def without(whole: dict[str, torch.Tensor], bad: set[int]) -> dict[str, torch.Tensor]:
    """Packs without the documents in `bad`: padding is what all else is."""
    rows = []
    for row in range(len(whole["input_ids"])):
        tokens = whole["input_ids"][row]
        good = torch.tensor([int(token) - 1 not in bad and token > 0 for token in tokens])
        left = int((~good).sum())
        padding = {"labels": torch.full((left,), -100), "position_ids": torch.arange(left)}
        rows.append(
            {
                key: torch.cat([value[row][good], padding.get(key, value.new_zeros(left))])
                for key, value in whole.items()
            }
        )
    return {key: torch.stack([row[key] for row in rows]) for key in whole}


WAYS = [(how, cut) for how in (("threads", 1), ("processes", 3)) for cut in ([8], [5, 0, 3])]


@pytest.mark.parametrize(("how", "cut"), left_out(WAYS, [WAYS[0], WAYS[3]]))
def test_a_pack_does_without_its_bad_documents_and_no_other_is_lost(cut, how):
    kind, workers = how
    bad = {11, 17, 40}
    healthy, damaged = packs_of(Dealt(64)), packs_of(Dealt(64, *bad))
    with Loader(healthy, [8], 0) as loader:
        expected = [without(next(loader), bad) for _ in range(len(healthy) // 8)]
    assert sum(len(batch["input_ids"]) for batch in expected) == len(healthy), "all packs are read"
    found, skipped = [], []
    for rank in range(len(cut)):
        given = {"kind": kind, "num_workers": workers, "bad_samples": "skip"}
        with Loader(damaged, cut, rank, **given) as loader:
            found.append([next(loader) for _ in expected])
            skipped += [(one.index, one.instead, one.why) for one in loader.skipped]
    for step, batch in enumerate(expected):
        joined = {key: torch.cat([parts[step][key] for parts in found]) for key in batch}
        assert all(torch.equal(joined[key], batch[key]) for key in batch)
    assert sorted(skipped) == [(k, None, "OSError: a bad sector") for k in sorted(bad)]


def test_another_pack_takes_the_place_of_one_whose_documents_are_all_bad(caplog):
    """A pack of padding alone would teach nothing."""
    pack = packs_of(Damaged(60), longest=9).documents_in(4).tolist()
    assert len(pack) == 3
    source = packs_of(Damaged(60, *pack), longest=9)
    with Loader(source, [len(source)], 0, bad_samples="skip") as loader:
        found = next(loader)["input_ids"][:, ::3]
        assert loader.last_indices.tolist().index(4) >= 0
        assert [one.index for one in loader.skipped] == pack
    times = np.bincount(found.flatten(), minlength=60)
    assert not times[pack].any() and sorted(times.tolist()) == [0] * 3 + [1] * 54 + [2] * 3
    assert f"sample {pack[0]} of mine cannot be read, its pack does without it" in caplog.text


def test_a_document_that_is_not_as_long_as_it_was_told_is_left_out():
    dataset = Dealt(30)
    source = packs_of(dataset)
    dataset.lengths[13] += 1
    with Loader(source, [len(source)], 0, bad_samples="skip") as loader:
        assert set(next(loader)["input_ids"].unique().tolist()) == set(range(31)) - {14}
        assert [one.index for one in loader.skipped] == [13]
    with raises(InputError, code="packed-length-wrong", what=13):
        fetch(source, np.arange(len(source)), "stop")


# -- in evaluations --------------------------------------------------------------------------------


def test_evaluations_tell_each_bad_sample_once_by_the_number_that_the_dataset_knows(caplog):
    """Two ranks, three evaluations of eight samples: 30 to 37."""
    _, held_out = split_held_out(as_source(Damaged(40, 3, 31, 32, 37, 39)), 0.25)
    found = []
    for rank in range(2):
        record: list[Skipped] = []
        for _ in range(3):
            given = {"batches": 2, "reading": Reading("skip"), "skipped": record}
            batches = [batch for batch, _ in evaluation_batches(held_out, [3, 1], rank, **given)]
        assert len(batches) == 2 and all(one.instead is not None for one in record)
        found.append([one.index for one in record])
    assert found == [[31, 32], [37]]
    assert sum("cannot be read" in record.message for record in caplog.records) == 3
    (_, *_) = evaluation_batches(held_out, [4], 0, batches=1, reading=Reading("skip"))
    assert "sample 31 of Damaged cannot be read" in caplog.records[-2].message


def test_of_a_stream_it_is_told_which_held_out_samples_are_bad():
    """They are read once, and evaluated as often as is asked for."""

    def doubled(sample: dict[str, int]) -> dict[str, int]:
        if sample["k"] % 5 == 3:
            raise ValueError("no such picture")
        return {"k": 2 * sample["k"]}

    def stream() -> Iterator[dict[str, int]]:
        yield from ({"k": k} for k in range(40))

    whole = StreamSource(stream, "mine", 4, form=StreamProcessing(doubled), reading=Reading("skip"))
    _, held_out = whole.split(2, read=True)
    record: list[Skipped] = []
    for _ in range(2):
        given = {"batches": 2, "reading": Reading("skip"), "skipped": record}
        found = [batch["k"].tolist() for batch, _ in evaluation_batches(held_out, [4], 0, **given)]
        assert found == [[0, 2, 4, 8], [8, 10, 12, 14]]
    assert [(one.index, one.instead) for one in record] == [(3, 4)]


# -- samples that never come -----------------------------------------------------------------------


class Absent(Damaged):
    """The samples in `bad` never come."""

    def __init__(self, n: int, *bad: int, text: bool = False) -> None:
        super().__init__(n, *bad, text=text)
        self.over = threading.Event()

    def __getitem__(self, k: int) -> Any:
        if k in self.bad:
            self.over.wait(60)
        return {"input_ids": [k] * 3}


def test_a_sample_that_never_comes_is_named():
    reading = Reading("skip", timeout_s=0.3)
    dataset = Absent(12, 0)
    with raises(StuckError, code="sample-timeout", what=(0, "0.3")):
        as_source(dataset, reading=reading)
    dataset.over.set()
    dataset = Absent(12, 10)
    _, held_out = split_held_out(as_source(dataset, reading=reading), 0.25)
    with raises(StuckError, code="sample-timeout", what=10):
        list(evaluation_batches(held_out, [3], 0, batches=1, reading=reading))
    dataset.over.set()


def test_what_is_read_in_time_comes_as_it_is():
    """Also if all of it takes longer than one sample may."""

    class Slow(Damaged):
        def __getitem__(self, k: int) -> Any:
            time.sleep(0.05)
            return super().__getitem__(k)

    source = as_source(Slow(12, 11))
    batch, _ = fetch_with_timeout(source, np.arange(10), Reading("stop", timeout_s=0.45))
    assert batch["input_ids"][:, 0].tolist() == list(range(10))
    with raises(TrainingError, code="sample-unreadable", what=11):
        fetch_with_timeout(source, np.arange(10, 12), DEFAULT_READING)
    with pytest.raises(SystemExit):
        run_with_timeout(lambda: sys.exit("as anything that is raised"), "mine", 1.0)


class Ends(Damaged):
    """The samples in `bad` raise what is no `Exception`."""

    error: type[BaseException] = KeyboardInterrupt

    def __getitem__(self, k: int) -> Any:
        if k in self.bad:
            raise self.error("enough")
        return {"input_ids": [k] * 3}


ENDS = [
    (kind, error)
    for kind in ("threads", "processes")
    for error in (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
]


@pytest.mark.parametrize(("kind", "error"), left_out(ENDS, ENDS[3:]))
def test_whatever_a_sample_raises_is_told_at_once(kind, error):
    class Other(Ends):
        pass

    Other.error = error
    told = f"{error.__name__}: enough"
    with Loader(Other(8, 7), [8], 0, kind=kind, num_workers=1) as loader:
        with raises(TrainingError, code="sample-unreadable", what=(7, told)):
            next(loader)
        assert not loader.lost_workers
    with Loader(Other(8, 7), [8], 0, kind=kind, num_workers=1, bad_samples="skip") as loader:
        assert 7 not in next(loader)["input_ids"] and [one.index for one in loader.skipped] == [7]
    with raises(TrainingError, code="sample-unreadable", what=(0, told)):
        as_source(Other(8, 0))


def test_whatever_a_stream_raises_is_told_at_once():
    def stream() -> Iterator[Any]:
        yield from ({"k": k} for k in range(5))
        raise KeyboardInterrupt

    with Loader(stream, [4], 0) as loader:
        next(loader)
        with raises(TrainingError, code="sample-unreadable", what=(5, "KeyboardInterrupt")):
            next(loader)


@pytest.mark.parametrize("many", [False, True])
def test_what_fails_now_and_then_is_not_told_to_be_readable(many):
    class Flaky(Damaged):
        calls = 0

        def __getitem__(self, k: int) -> Any:
            if k == 5:
                self.calls += 1
                if self.calls % 2:
                    raise OSError(f"try {self.calls}")
            return {"input_ids": [k] * 3}

    class FlakyTogether(Flaky):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[k] for k in indices]

    source = as_source((FlakyTogether if many else Flaky)(12))
    with pytest.raises(TrainingError) as caught:
        fetch(source, np.arange(12), "stop")
    assert ("12 samples of" in caught.value.what) if many else ("sample 5 of" in caught.value.what)
    assert "OSError: try 3" in caught.value.what and "put together" not in caught.value.what
