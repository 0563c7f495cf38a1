"""Documents one by one and packed: what samples hold, from files, datasets and factories."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gpumix.data.core.source import Source
from gpumix.data.loader import Loader
from gpumix.data.sources.iterable_documents import StreamDocuments, TokenConversion
from gpumix.data.sources.open_data import open_data
from gpumix.data.sources.pretokenized import OwnSamples
from gpumix.data.text.document_packing import PackedDocuments
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.job.job import Job
from helpers.errors import raises
from helpers.samples.sources import write, write_tokenizer

END = 256
_NAMES = (f"documents_module_{number}" for number in itertools.count())


def opened(folder: Path, length: int = 8, task: str = "causal-lm", **data: Any) -> Source:
    tokenizer = data.pop("tokenizer", "bytes")
    job = Job.model_validate(
        {
            "model": {"config": {"model_type": "any"}, "task": task},
            "sequence_length": length,
            "global_batch_size": 2,
            "max_steps": 1,
            "tokenizer": tokenizer,
            "data": {"validation_split": 0, **data},
        }
    )
    return open_data(job, folder, folder / "cache")[0]


def samples_of(source: Source) -> list[list[int]]:
    """The tokens of each sample, padding aside."""
    batch = source.rows(np.arange(len(source)))
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [tokens[mask != 0].tolist() for tokens, mask in rows]


def documents_of(packed: dict[str, torch.Tensor]) -> list[list[int]]:
    """What stands in a batch of packs, by their positions."""
    found: list[list[int]] = []
    for tokens, positions in zip(packed["input_ids"], packed["position_ids"], strict=True):
        for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
            if position == 0:
                found.append([])
            assert position == len(found[-1])
            found[-1].append(token)
    return found


@pytest.fixture
def files(tmp_path) -> Path:
    for name, content in {
        "a": b"abcde",
        "b": b"0123456789abcdefghij",
        "c": b"x",
        "d": b"k",
    }.items():
        write(tmp_path / "in" / name, content)
    return tmp_path


def test_every_file_is_a_sample_and_long_ones_are_cut(files):
    source = opened(files, text=["in"], packing="none")
    assert samples_of(source) == [
        [*b"abcde", END],
        [*b"01234567"],
        [*b"89abcdef"],
        [*b"ghij", END],
        [*b"x", END],
        [*b"k", END],
    ]
    assert source.lengths.tolist() == [6, 8, 8, 5, 2, 2]
    batch = source.rows(np.array([4, 0]))
    assert batch["input_ids"].tolist() == [[*b"x", *[END] * 5], [*b"abcde", END]]
    assert batch["labels"].tolist() == [[*b"x", END, *[-100] * 4], [*b"abcde", END]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1] * 6]
    assert all(value.dtype == torch.int64 for value in batch.values())
    none = source.rows(np.empty(0, dtype=np.int64))
    assert {key: value.dtype for key, value in none.items()} == dict.fromkeys(batch, torch.int64)
    assert all(len(value) == 0 for value in none.values())


def test_a_rest_of_one_token_is_left_out(tmp_path):
    write(tmp_path / "a", b"12345678")
    assert samples_of(opened(tmp_path, text=["a"], packing="none")) == [[*b"12345678"]]


def test_every_line_is_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("gpumix.data.text.files._CHUNK_BYTES", 3)
    write(tmp_path / "a", b"one\n\n  \ntwo two\nthe end")
    lines = opened(tmp_path, text=["a"], packing="none", document="line")
    assert samples_of(lines) == [[*line, END] for line in (b"one", b"two two", b"the end")]
    write_tokenizer(tmp_path / "t.json", "</s>")
    write(tmp_path / "b", b"the cat\nsat on\n")
    lines = opened(tmp_path, text=["b"], packing="none", document="line", tokenizer="t.json")
    assert samples_of(lines) == [[2, 3, 1], [4, 5, 1]]


def test_packs_hold_whole_documents_that_begin_anew(files):
    source = opened(files, text=["in"], packing="documents")
    batch = source.rows(np.arange(len(source)))
    assert batch["input_ids"].shape == (len(source), 8) and len(source) == 4
    whole = samples_of(opened(files, text=["in"], packing="none"))
    padding = [document for document in documents_of(batch) if set(document) == {END}]
    documents = [document for document in documents_of(batch) if set(document) != {END}]
    assert sorted(documents) == sorted(whole)
    assert sum(map(len, padding)) == 4 * 8 - sum(map(len, whole))
    firsts = batch["position_ids"] == 0
    assert (batch["labels"][firsts] == -100).all()
    counted = batch["labels"] != -100
    assert torch.equal(batch["labels"][counted], batch["input_ids"][counted])
    assert int(counted.sum()) == sum(len(document) - 1 for document in whole)
    none = source.rows(np.empty(0, dtype=np.int64))
    assert none["input_ids"].shape == (0, 8) and none.keys() == batch.keys()


def test_a_pack_is_the_same_for_any_share_of_it(files):
    source = opened(files, text=["in"], packing="documents")
    together = source.rows(np.arange(len(source)))
    for number in range(len(source)):
        alone = source.rows(np.array([number]))
        assert all(torch.equal(alone[key][0], together[key][number]) for key in together)


def test_what_packs_depend_on_is_in_their_fingerprint(files):
    documents = OwnSamples(Rows(9), "rows", longest=8)
    marks = [
        PackedDocuments(documents, seed=seed, predicts_next=True, window=window).fingerprint
        for seed, window in ((0, 4), (1, 4), (0, 5))
    ]
    assert len(set(marks)) == 3
    assert opened(files, text=["in"], packing="none").fingerprint not in marks


class Rows:
    """Sample k has k + 1 tokens k, and labels of its own."""

    def __init__(self, n: int, lengths: bool = True) -> None:
        self.n = n
        if lengths:
            self.lengths = np.arange(1, n + 1)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> dict[str, list[int]]:
        return {"input_ids": [k] * (k + 1), "labels": [100 + k] * (k + 1)}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(1, 30), longest=st.integers(1, 12), seed=st.integers(0, 2))
def test_each_token_of_own_samples_is_in_one_pack(n, longest, seed):
    packed = PackedDocuments(
        OwnSamples(Rows(n), "rows", longest=longest), seed=seed, predicts_next=False, window=7
    )
    batch = packed.rows(np.arange(len(packed)))
    labels, counts = np.unique(batch["labels"][batch["labels"] != -100], return_counts=True)
    assert labels.tolist() == [100 + k for k in range(n)]
    assert counts.tolist() == [min(k + 1, longest) for k in range(n)]
    assert packed.filled == counts.sum() / batch["labels"].numel()


def test_a_samples_own_mask_hides_tokens():
    row = {"input_ids": [1, 2, 3, 4], "attention_mask": [0, 1, 1, 0], "labels": [9, 8, 7, 6]}
    source = OwnSamples([row], "rows", longest=8)
    assert source[0]["input_ids"].tolist() == [2, 3]
    assert source[0]["labels"].tolist() == [8, 7]


def test_lengths_that_are_wrong_are_told():
    wrong = Rows(4)
    wrong.lengths = np.array([1, 2, 3, 5])
    packed = PackedDocuments(OwnSamples(wrong, "rows", longest=8), seed=0, predicts_next=True)
    with raises(InputError, code="packed-length-wrong", what=(3, 5, 4, "input_ids")):
        packed.rows(np.arange(len(packed)))
    with raises(InputError, code="sample-lengths-unknown"):
        PackedDocuments(
            OwnSamples(Rows(4, lengths=False), "r", longest=8), seed=0, predicts_next=True
        )


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        (np.array([1, 2, 3]), "[3]"),
        ("abc", "str"),
        (["a", "b", "c", "d"], "<U1"),
        ([1.0, 2.0, 3.0, 4.0], "float64"),
        ([[1], [1, 2], [3], [4]], "list"),
        ([1, 2, 0, 4], "sample 2"),
        (np.ones, type(np.ones).__name__),
    ],
)
def test_what_is_no_list_of_lengths_is_told(lengths, told):
    wrong = Rows(4)
    wrong.lengths = lengths
    with raises(InputError, code="sample-lengths-invalid", what=(4, told)):
        OwnSamples(wrong, "rows", longest=8)


ODD = [
    ({"labels": [1]}, "sample-length-mismatch", ("labels", "[1]")),
    ({"labels": [1, 2, 3]}, "sample-length-mismatch", ("labels", "[3]")),
    ({"attention_mask": [1, 1, 1]}, "sample-length-mismatch", ("attention_mask", "[3]")),
    ({"labels": [0.5, 0.5]}, "labels-not-integers", ("labels", "torch.float32")),
    ({"labels": None}, "sample-keys-differ", ("attention_mask", "input_ids")),
]


@pytest.mark.parametrize(("changed", "code", "named"), ODD)
def test_what_does_not_go_with_its_tokens_is_named(changed, code, named):
    first = {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]}
    odd = {key: value for key, value in (first | changed).items() if value is not None}
    source = OwnSamples([first, odd], "rows", longest=8)
    with raises(InputError, code=code, what=(1, *named)) as caught:
        source.rows(np.arange(2))
    assert caught.value.fix


def test_a_decoder_has_labels_of_its_own_length():
    samples = [{"input_ids": [1, 2], "labels": [1, 2, 3]}]
    batch = OwnSamples(samples, "rows", longest=8, aligned=False).rows(np.arange(1))
    assert batch["labels"].tolist() == [[1, 2, 3]]


def test_tokens_of_unlike_dtypes_come_as_int64():
    samples = [{"input_ids": torch.tensor([1], dtype=d)} for d in (torch.int32, torch.int64)]
    batch = OwnSamples(samples, "rows", longest=8).rows(np.arange(2))
    assert {value.dtype for value in batch.values()} == {torch.int64}


@pytest.mark.parametrize("tokens", [[], [0.5], [[1]], None])
def test_what_is_no_list_of_tokens_is_named(tokens):
    samples = [{"input_ids": [1]}, {"input_ids": tokens} if tokens is not None else {"x": [1]}]
    code = "sample-without-tokens" if tokens is not None else "sample-keys-differ"
    with raises(InputError, code=code, what=1):
        OwnSamples(samples, "rows", longest=8).rows(np.arange(2))


def test_a_specimen_is_as_long_as_any_sample_and_has_padding():
    batch = OwnSamples(Rows(4), "rows", longest=8).specimen(np.arange(3))
    assert {tuple(value.shape) for value in batch.values()} == {(3, 8)}
    assert batch["attention_mask"].sum() == 23


# -- datasets and factories ------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path) -> Callable[..., Any]:
    import datasets

    datasets.disable_progress_bars()

    def saved(name: str, **columns: Iterable[Any]) -> str:
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / name))
        return name

    return saved


def test_rows_of_a_saved_dataset_stay_as_they_are(tmp_path, save):
    rows = [[1, 2, 3], [4], [5] * 10]
    masks = [[1, 1, 0], [1], [1] * 10]
    plain = opened(tmp_path, dataset=save("plain", input_ids=rows), packing="none")
    assert samples_of(plain) == [[1, 2, 3], [4], [5] * 8]
    assert plain.lengths.tolist() == [3, 1, 8]
    masked = save("masked", input_ids=rows, attention_mask=masks)
    assert opened(tmp_path, dataset=masked, packing="none").lengths.tolist() == [2, 1, 8]
    packed = opened(tmp_path, dataset=masked, packing="documents")
    batch = packed.rows(np.arange(len(packed)))
    assert sorted(documents_of(batch))[:3] == [[1, 2], [4], [5] * 8]
    with raises(InputError, code="row-without-tokens", what=1):
        opened(tmp_path, dataset=save("none", input_ids=[[1], []]), packing="none")


def test_texts_of_a_saved_dataset_are_documents(tmp_path, save):
    name = save("texts", text=["ab", "", "cdef"])
    assert samples_of(opened(tmp_path, dataset=name, packing="none")) == [
        [*b"ab", END],
        [*b"cdef", END],
    ]


def test_texts_are_tokenised_as_they_are_read(tmp_path, save):
    name = save("texts", text=["the cat", "the cat sat on the mat the", "mat"])
    write_tokenizer(tmp_path / "t.json", "</s>")
    given = {"dataset": name, "tokenizer": "t.json", "tokenize": "on-the-fly", "length": 5}
    source = opened(tmp_path, packing="none", **given)
    assert samples_of(source) == [[2, 3, 1], [2, 3, 4, 5, 2], [6, 1]]
    assert source.lengths is None and not (tmp_path / "cache").exists()
    bucketed = opened(tmp_path, packing="none", bucketing=True, **given)
    assert bucketed.lengths.tolist() == [3, 5, 2]
    assert {file.suffix for file in (tmp_path / "cache").iterdir()} == {".npy", ".lock"}
    packed = opened(tmp_path, packing="documents", **given)
    assert sorted(documents_of(packed.rows(np.arange(2)))) == [[2, 3, 1], [2, 3, 4, 5, 2], [6, 1]]


def test_lengths_are_counted_once(tmp_path, save, monkeypatch):
    given = {"dataset": save("texts", text=["ab", "c"]), "tokenize": "on-the-fly"}
    given |= {"packing": "none", "bucketing": True}
    first = opened(tmp_path, **given).lengths.tolist()
    monkeypatch.setattr("gpumix.data.sources.tokenize_on_read.TokenizedTexts.count_tokens", None)
    assert opened(tmp_path, **given).lengths.tolist() == first == [3, 2]
    (file,) = (tmp_path / "cache").glob("*.npy")
    file.write_bytes(b"torn")
    with pytest.raises(TypeError):  # it is counted again, by what is not there any more
        opened(tmp_path, **given)


def test_a_cache_that_cannot_be_written_is_told(tmp_path, save):
    (tmp_path / "cache").write_text("")
    with pytest.raises(MachineError):
        opened(
            tmp_path,
            dataset=save("texts", text=["ab", "c"]),
            tokenize="on-the-fly",
            packing="documents",
        )


MODULE = """
class Texts(list):
    pass

def texts(lengths):
    made = Texts(["ab", {"body": "cde"}])
    if lengths:
        made.lengths = [3, 4]
    return made

def stories():
    return [{"story": "ab"}, {"story": "cde"}]

def rows():
    return [{"input_ids": [1, 2]}, {"input_ids": [3]}]
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    name = next(_NAMES)
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    return name


def test_a_factory_may_give_texts(tmp_path, module):
    given = {"factory": f"{module}:texts", "tokenize": "on-the-fly", "column": "body"}
    source = opened(tmp_path, packing="none", arguments={"lengths": True}, **given)
    assert samples_of(source) == [[*b"ab", END], [*b"cde", END]]
    assert source.lengths.tolist() == [3, 4]
    with raises(InputError, code="sample-lengths-unknown", what="data.bucketing"):
        opened(tmp_path, packing="none", bucketing=True, arguments={"lengths": False}, **given)
    with raises(InputError, code="sample-not-text", what=1):
        opened(
            tmp_path, packing="none", arguments={"lengths": True}, **{**given, "column": "text"}
        )[1]


def test_a_factory_may_give_samples_of_unlike_length(tmp_path, module):
    source = opened(tmp_path, factory=f"{module}:rows", packing="none")
    assert samples_of(source) == [[1, 2], [3]] and source.lengths is None
    with raises(InputError, code="sample-lengths-unknown"):
        opened(tmp_path, factory=f"{module}:rows", packing="documents")


def test_fixes_of_a_factorys_data_name_the_keys_that_work(tmp_path, module):
    """Each error's own fix leads to the next, and at last to samples."""
    data: dict[str, Any] = {"factory": f"{module}:stories"}
    told = []
    for _ in range(4):
        try:
            source = opened(tmp_path, **data)
        except InputError as error:
            told.append(error.what)
            given = re.findall(r"--set data\.(\w+)=(\S+?)(?= |;|$)", error.fix)
            data |= {key: yaml.safe_load(value) for key, value in given}
    assert len(told) == 2 and samples_of(source) == [[*b"ab", END], [*b"cde", END]]
    assert data.keys() == {"factory", "tokenize", "packing", "column"}
    packed = {**data, "packing": "documents"}
    with raises(InputError, code="sample-lengths-unknown") as caught:
        opened(tmp_path, **packed)
    assert caught.value.fix.endswith("--set data.packing=none")
    with raises(InputError, code="factory-arguments-invalid", what="shelf") as caught:
        opened(tmp_path, **data, arguments={"shelf": 3})
    assert caught.value.where == "data.arguments" and "--set data.arguments=" in caught.value.fix
    with pytest.raises(ValidationError, match="'tokenize"):
        opened(tmp_path, factory=f"{module}:stories", column="story")


def test_what_does_not_go_with_a_task_is_refused(tmp_path, files, module):
    with raises(InputError, code="labels-copy-input"):
        opened(files, text=["in"], packing="documents", task="masked-lm")
    with raises(InputError, code="seq2seq-not-packable"):
        opened(tmp_path, factory=f"{module}:rows", packing="documents", task="seq2seq-lm")


def test_a_loader_pads_to_the_longest_of_a_ranks_samples():
    source = OwnSamples(Rows(12), "rows", longest=12)
    with Loader(source, [2, 4], 0) as one, Loader(source, [2, 4], 1) as other:
        widths = set()
        for loader, samples in ((one, 2), (other, 4)):
            batch = next(loader)["input_ids"]
            longest = max(k + 1 for k in loader.last_indices)
            assert batch.shape == (samples, longest)
            widths.add(longest)
        held = [*one.last_indices, *other.last_indices]
    assert len(set(held)) == 6
    assert len(widths) == 2, "samples are all of unlike lengths"


def test_what_happens_to_be_as_long_as_the_tokens_is_not_cut():
    """A decoder's labels and an image of three channels, beside three tokens."""
    hidden = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]}
    image = torch.rand(3, 2, 2)
    samples = [
        {"input_ids": [1] * n, "attention_mask": [1] * n, "weights": [0.5] * n, "image": image}
        for n in (5, 3)
    ]
    samples[1] |= hidden
    found = OwnSamples(samples, "rows", longest=8)[1]
    assert found["input_ids"].tolist() == [1, 2] and found["weights"].tolist() == [0.5, 0.5]
    assert torch.equal(found["image"], image)
    own = {"labels": [7, 8, 9], "decoder_input_ids": [0, 7, 8]}
    found = OwnSamples([hidden | own], "rows", longest=8, aligned=False)[0]
    assert {key: found[key].tolist() for key in own} == own
    stream = StreamDocuments("mine", TokenConversion(aligned=False), 8).padded()
    found = stream.transform(hidden | own)
    assert {key: found[key].tolist() for key in own} == own
