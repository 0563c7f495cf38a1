"""Documents of streams: tokenised as they are read, padded or packed, the same in every plan."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpumix.data.core.read_policy import Reading
from gpumix.data.core.source import Source
from gpumix.data.core.tokenizer import ByteTokenizer
from gpumix.data.loader import Loader
from gpumix.data.order.sampler import NO_INDICES
from gpumix.data.sources.iterable import StreamSource
from gpumix.data.sources.iterable_documents import StreamDocuments, TextConversion, TokenConversion
from gpumix.data.sources.open_data import open_data
from gpumix.schema.errors import InputError, TrainingError
from gpumix.schema.job.job import Job
from helpers.errors import raises
from helpers.extended import every_second, left_out

LENGTH, END, BATCH = 16, 256, 8
_NAMES = (f"stream_documents_{number}" for number in itertools.count())


def words(count: int = 300, seed: int = 0) -> list[str]:
    """Texts of 0 to 40 letters, each another one."""
    lengths = np.random.default_rng(seed).integers(0, 37, count)
    return [f"{k:03}" + "x" * int(length) for k, length in enumerate(lengths)]


def texts() -> Iterator[dict[str, str]]:
    yield from ({"text": one} for one in words())


def sharded() -> Any:
    datasets = pytest.importorskip("datasets")

    def of(shards: list[int]) -> Iterator[dict[str, str]]:
        for shard in shards:
            yield from ({"text": one} for one in words()[shard::4])

    return datasets.IterableDataset.from_generator(of, gen_kwargs={"shards": list(range(4))})


def documents(bad: str = "stop", kind: Any = None) -> StreamDocuments:
    kind = kind or TextConversion(ByteTokenizer(), "text")
    return StreamDocuments("mine", kind, LENGTH, Reading(bad))  # type: ignore[arg-type]


def packed(stream: Any = texts, seed: int = 0, **given: Any) -> StreamSource:
    form = documents(**given).packed(seed=seed, predicts_next=True)
    return StreamSource(stream, "mine", BATCH, form=form)


def padded(stream: Any = texts, **given: Any) -> StreamSource:
    return StreamSource(stream, "mine", BATCH, form=documents(**given).padded())


def parts_of(texts: list[str]) -> list[tuple[int, ...]]:
    """The documents that texts become: of at most LENGTH tokens, and more than one."""
    whole = [(*one.encode(), END) for one in texts]
    cut = [one[first : first + LENGTH] for one in whole for first in range(0, len(one), LENGTH)]
    return [part for part in cut if len(part) > 1]


def documents_in(batch: dict[str, torch.Tensor]) -> list[list[tuple[int, ...]]]:
    """Of each pack, told apart by positions; without padding, whose labels do not count."""
    found = []
    for tokens, labels, positions in zip(
        batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist()
    ):
        begins = [k for k, position in enumerate(positions) if position == 0] + [LENGTH]
        pack = []
        for begin, end in itertools.pairwise(begins):
            assert positions[begin:end] == list(range(end - begin))
            assert labels[begin] == -100
            counted = labels[begin + 1 : end]
            if counted == tokens[begin + 1 : end] and counted:
                pack.append(tuple(tokens[begin:end]))
            else:
                assert set(counted) <= {-100}
        found.append(pack)
    return found


def a_pass(source: Source, count: int) -> tuple[list[list[tuple[int, ...]]], int]:
    """Packs until they hold so many documents, and how many packs that were."""
    packs: list[list[tuple[int, ...]]] = []
    while sum(map(len, packs)) < count:
        packs += documents_in(source.rows(np.array([len(packs)])))
    return packs, len(packs)


def life(source: Callable[[], Source], cut: list[int], steps: int, **given: Any) -> list[Any]:
    """Of each step the rows of all ranks, in rank order."""
    loaders = [Loader(source(), cut, rank, **given) for rank in range(len(cut))]
    try:
        return [
            [row for own in loaders for row in next(own)["input_ids"].tolist()]
            for _ in range(steps)
        ]
    finally:
        for loader in loaders:
            loader.close()


def test_a_pass_packs_each_document_once_and_whole():
    expected = parts_of(words())
    packs, count = a_pass(packed(), len(expected))
    assert sorted(one for pack in packs for one in pack) == sorted(expected)
    assert count < len(expected)
    again = packed()
    again.rows(np.array([count - 1]))
    second = documents_in(again.rows(np.arange(count, 2 * count)))
    assert sorted(one for pack in second for one in pack) == sorted(expected)
    assert second != packs  # another order


def test_packs_are_shuffled_by_the_seed():
    """First-fit makes them longest first."""
    one, same, other = (packed(seed=s).rows(np.arange(20))["input_ids"] for s in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    longest = [max(map(len, pack)) for pack in documents_in(packed().rows(np.arange(60)))]
    assert longest != sorted(longest, reverse=True)


@pytest.mark.parametrize("lanes", every_second([64, 1]))
def test_little_of_the_packs_is_padding(lanes):
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 6000).astype(int).clip(2, 2000)

    def numbers() -> Iterator[dict[str, torch.Tensor]]:
        yield from ({"input_ids": torch.zeros(int(n), dtype=torch.int64)} for n in lengths)

    form = StreamDocuments("mine", TokenConversion(aligned=True), 512).packed(
        seed=0, predicts_next=True
    )
    assert form.repack is not None
    packs = sum(1 for _ in form.repack(numbers(), lanes, (0, 0)))
    assert lengths.clip(max=512).sum() / (512 * packs) > 0.985


PLANS: list[tuple[Any, list[int], dict[str, Any]]] = [
    (texts, [5, 3], {}),
    (sharded, [1, 0, 7], {"num_workers": 0}),
    (sharded, [2, 6], {"num_workers": 2, "kind": "processes"}),
    (texts, [2, 6], {"num_workers": 2, "kind": "processes"}),
]
# Of packed documents the first and the third, of padded ones the others.
MADE = [((packed, padded)[(n + other) % 2], *p) for other in (0, 1) for n, p in enumerate(PLANS)]


@pytest.mark.parametrize(("make", "stream", "cut", "given"), left_out(MADE, [*MADE[:2], *MADE[3:]]))
def test_samples_are_the_same_in_every_plan(make, stream, cut, given):
    def source() -> Source:
        return make(stream if stream is texts else stream())

    def bare(steps: list[Any]) -> list[Any]:
        """Each rank pads by itself."""
        return [[[t for t in row if t != END] for row in step] for step in steps]

    alone = life(source, [BATCH], 12, num_workers=0)
    assert bare(life(source, cut, 12, **given)) == bare(alone)


def test_documents_of_a_window_are_waited_for_one_by_one():
    """Together they take longer than one may."""

    def slow() -> Iterator[dict[str, str]]:
        for one in words(24):
            time.sleep(0.05)
            yield {"text": one}

    kind = TextConversion(ByteTokenizer(), "text")
    form = StreamDocuments("mine", kind, LENGTH).packed(seed=0, predicts_next=True)
    StreamSource(slow, "mine", BATCH, form=form, reading=Reading(timeout_s=0.8))


@pytest.mark.parametrize("make", every_second([packed, padded]))
def test_a_run_goes_on_elsewhere(make):
    whole = life(make, [BATCH], 10, num_workers=0)
    with Loader(make(), [5, 3], 0) as first:
        for _ in range(6):
            next(first)
        state = first.state_dict()
    with Loader(make(), [BATCH], 0, num_workers=1, kind="processes") as other:
        other.load_state_dict(state)
        assert next(other)["input_ids"].tolist() == whole[6]


def test_lanes_hold_each_document_once():
    source, expected = packed(sharded()), parts_of(words())
    found: list[tuple[int, ...]] = []
    last = 0
    while not set(expected) <= set(found):
        found += [d for pack in documents_in(source.rows(np.arange(last, last + 8))) for d in pack]
        last += 8
    assert last < len(expected) and set(found) == set(expected)


def test_padded_samples_are_the_beginnings_of_texts():
    batch = padded().rows(np.arange(300, 308))
    masks = batch["attention_mask"].bool()
    rows = [row[mask].tolist() for row, mask in zip(batch["input_ids"], masks)]
    assert rows == [[*one.encode(), END][:LENGTH] for one in words()[:8]]
    assert (batch["labels"][~masks] == -100).all()
    assert torch.equal(batch["labels"][masks], batch["input_ids"][masks])


def test_what_is_measured_is_as_long_as_any():
    batch = padded().specimen(np.arange(3))
    assert batch["input_ids"].shape == (3, LENGTH)
    assert batch["attention_mask"].sum(1).tolist() == [LENGTH, LENGTH, LENGTH - 1]
    assert packed().specimen(np.arange(3))["input_ids"].shape == (3, LENGTH)


def labelled() -> Iterator[dict[str, Any]]:
    for k in range(50):
        length = k % 20 + 1
        yield {"input_ids": [k] * length, "labels": [-100] + [k + 100] * (length - 1)}


def test_own_tokens_keep_their_labels_and_lose_what_is_too_long():
    kind = TokenConversion(aligned=True)
    batch = padded(labelled, kind=kind).rows(np.array([2, 19]))
    assert batch["input_ids"].tolist() == [[2] * 3 + [0] * 13, [19] * 16]
    assert batch["labels"].tolist() == [[-100] + [102] * 2 + [-100] * 13, [-100] + [119] * 15]
    packs = packed(labelled, kind=kind).rows(np.arange(10))
    counted = packs["labels"] != -100
    assert torch.equal(packs["labels"][counted], packs["input_ids"][counted] + 100)


def broken() -> Iterator[Any]:
    yield from ({"text": one if k % 7 != 3 else None} for k, one in enumerate(words()))


def test_what_is_no_text_is_told_or_passed_over():
    with raises(InputError, code="sample-not-text", what=3):
        packed(broken)
    with raises(InputError, code="sample-not-text"):
        padded(broken).rows(np.arange(4))
    good = parts_of([one for k, one in enumerate(words()) if k % 7 != 3])
    packs, _ = a_pass(packed(broken, bad="skip"), len(good))
    assert sorted(one for pack in packs for one in pack) == sorted(good)


WAYS = [(how, cut) for how in (("threads", 1), ("processes", 2)) for cut in ([8], [5, 0, 3])]


@pytest.mark.parametrize(("how", "cut"), left_out(WAYS, [WAYS[0], *WAYS[2:]]))
def test_each_document_that_is_passed_over_is_counted_once_a_pass(cut, how):
    """By who takes the pack behind it, though all ranks read the stream."""
    good = parts_of([one for k, one in enumerate(words()) if k % 7 != 3])
    _, in_a_pass = a_pass(packed(broken, bad="skip"), len(good))
    kind, workers = how
    found = []
    for rank in range(len(cut)):
        given = {"kind": kind, "num_workers": workers, "bad_samples": "skip"}
        with Loader(packed(broken, bad="skip"), cut, rank, **given) as loader:
            for _ in range(in_a_pass // BATCH + 1):  # into the second pass
                next(loader)
            found += loader.skipped
    assert Counter(one.index for one in found) == dict.fromkeys(range(3, len(words()), 7), 2)
    assert {one.instead for one in found} == {None}
    assert all(f"document {one.index} should be a text" in one.why for one in found)


def test_documents_with_other_keys_are_refused():
    def mixed() -> Iterator[dict[str, Any]]:
        yield {"input_ids": [1, 2], "labels": [1, 2]}
        yield {"input_ids": [1, 2]}

    with raises(InputError, code="document-keys-differ", what="input_ids"):
        packed(mixed, kind=TokenConversion(aligned=True))


def test_what_breaks_is_told():
    def ends() -> Iterator[dict[str, str]]:
        yield {"text": "abc"}
        raise OSError("the network is gone")

    with raises(TrainingError, code="sample-unreadable", what="the network is gone"):
        packed(ends)


def test_a_place_belongs_to_what_samples_are_made_by():
    own = TokenConversion(aligned=True)
    made = [
        packed(),
        packed(seed=1),
        packed(labelled, kind=own),
        padded(),
        padded(labelled, kind=own),
    ]
    assert len({source.fingerprint for source in made}) == len(made)


# -- in jobs ---------------------------------------------------------------------------------------

MODULE = """
def texts(count=300):
    for k in range(count):
        yield {"text": f"{k:03}" + "x" * (k * 7 % 30), "other": 1}

def tokens():
    for k in range(100):
        yield {"input_ids": [k] * (k % 20 + 1)}

class Unknown:
    lengths = [3] * 100
    def __len__(self):
        return 100
    def __getitem__(self, k):
        last = 300 if k in (0, 17, 60) else k
        return {"input_ids": [k, k, last], "labels": [k, -100, k if k != 23 else -1]}

def unknown_stream():
    yield from (Unknown()[k] for k in range(100))
"""


def opened(folder: Path, task: str = "causal-lm", **data: Any) -> tuple[Source, Source]:
    name = next(_NAMES)
    (folder / f"{name}.py").write_text(MODULE)
    job = Job.model_validate(
        {
            "model": {"config": {"model_type": "any"}, "task": task},
            "sequence_length": LENGTH,
            "global_batch_size": 2,
            "max_steps": 1,
            "eval_steps": 1,
            "eval_batches": 3,
            "data": {**data, "factory": f"{name}:{data['factory']}"},
        }
    )
    return open_data(job, folder, folder / "cache", vocabulary=300)


@pytest.mark.parametrize("factory", every_second(["unknown_stream", "Unknown"]))
def test_a_pack_does_without_documents_of_tokens_that_the_model_does_not_know(tmp_path, factory):
    """Which are told by their own numbers, not by those of packs."""
    given = {"factory": factory, "packing": "documents", "validation_split": 0}
    train, _ = opened(tmp_path, **given, bad_samples="skip")
    assert len(train.rows(NO_INDICES)["input_ids"]) == 0
    bad, per_pack = {0, 17, 23, 60}, LENGTH // 3
    packs = 100 // per_pack if factory == "Unknown" else -(-96 // per_pack)
    with Loader(train, [packs], 0, bad_samples="skip") as loader:
        tokens = next(loader)["input_ids"]
        found = {int(row[3 * k]) for row in tokens for k in range(per_pack)}
        assert found | {0} == set(range(100)) - bad | {0}
        assert {one.index: one.instead for one in loader.skipped} == dict.fromkeys(bad)
    with raises(InputError, code="token-outside-vocabulary", what=(0, 300)):
        opened(tmp_path, **given)


@pytest.mark.parametrize("packing", ["documents", "none"])
@pytest.mark.parametrize(("factory", "tokenize"), [("texts", "on-the-fly"), ("tokens", "ahead")])
def test_a_job_packs_or_pads_a_stream_and_holds_out_the_first(tmp_path, factory, tokenize, packing):
    given = {"factory": factory, "tokenize": tokenize, "packing": packing}
    whole, none = opened(tmp_path, **given, validation_split=0)
    train, held_out = opened(tmp_path, **given)
    assert (len(none), len(held_out)) == (0, 6)
    first, rest = whole.rows(np.arange(6)), whole.rows(np.arange(6, 12))
    kept, read = held_out.rows(np.arange(6)), train.rows(np.arange(6))
    assert all(torch.equal(first[key], kept[key]) for key in first)
    assert all(torch.equal(rest[key], read[key]) for key in rest)
    assert (
        rest.keys()
        == read.keys()
        == {
            "input_ids",
            "labels",
            "position_ids" if packing == "documents" else "attention_mask",
        }
    )


def test_what_a_stream_cannot_be(tmp_path):
    with raises(InputError, code="stream-not-sortable"):
        opened(tmp_path, factory="tokens", packing="none", bucketing=True)
    with raises(InputError, code="seq2seq-not-packable", what="seq2seq-lm"):
        opened(tmp_path, "seq2seq-lm", factory="tokens", packing="documents")
    with raises(InputError, code="labels-copy-input"):
        opened(tmp_path, "masked-lm", factory="texts", packing="none", tokenize="on-the-fly")
    with raises(InputError, code="sample-not-text", what=0):
        opened(tmp_path, factory="tokens", packing="documents", tokenize="on-the-fly")
