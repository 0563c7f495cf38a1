"""From a job to its sources: text, a saved dataset, a factory; paths start from its folder."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpumix.data.core.source import Source
from gpumix.data.sources.open_data import open_data
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from helpers.errors import raises
from helpers.samples.sources import write_tokenizer

_NAMES = (f"user_module_{number}" for number in itertools.count())

MODULE = """
import helper_of_{name}
import torch

class Data:
    def __init__(self, n, length=4):
        self.n, self.length = n, length
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        return {{"input_ids": torch.full((self.length,), index)}}

def make(n, length=4):
    return Data(n, length)

def make_generator(n, length=4):
    for k in range(n):
        yield {{"input_ids": torch.full((length,), k)}}

def make_passes(n):
    return lambda number: make_generator(n)

def make_set(n):
    return set(range(n))

def make_masked():
    mask = torch.tensor([1, 1, 0, 0])
    return [{{"input_ids": torch.arange(4), "attention_mask": mask}} for _ in range(9)]

def make_labelled():
    return [{{"input_ids": torch.arange(4), "labels": torch.full((4,), -100)}} for _ in range(9)]

def make_nameless():
    return [{{"tokens": torch.arange(4)}} for _ in range(9)]

def make_source(n):
    from gpumix.data.sources.map_style import SampleSource
    return SampleSource(Data(n), "own name")

number = 3
"""


def job(**data: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"config": {}},
            "sequence_length": 4,
            "global_batch_size": 2,
            "max_steps": 1,
            "data": data,
        }
    )


def opened(folder: Path, **data: Any) -> tuple[Source, Source]:
    return open_data(job(**data), folder, folder / "cache")


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """The name of a module in the job's folder, new for each test."""
    name = next(_NAMES)
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    (tmp_path / f"helper_of_{name}.py").write_text("")
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    return name


def test_text_is_found_from_the_folder_and_split(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(40)))
    train, held_out = opened(tmp_path, text=["a.txt"], validation_split=0.2)
    assert (len(train), len(held_out)) == (8, 2)
    assert train[1]["input_ids"].tolist() == [4, 5, 6, 7] == train[1]["labels"].tolist()
    assert held_out[0]["input_ids"].tolist() == [32, 33, 34, 35]
    masked = train.rows(np.array([0]))
    masked["labels"].fill_(-100)
    assert masked["input_ids"].tolist() == [[0, 1, 2, 3]]


def test_a_tokenizer_is_found_from_the_folder(tmp_path):
    write_tokenizer(tmp_path / "t.json", "</s>")
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    named = job(text=["a.txt"], validation_split=0).model_copy(update={"tokenizer": Path("t.json")})
    train, held_out = open_data(named, tmp_path, tmp_path / "cache")
    assert train[0]["input_ids"].tolist() == [2, 3, 4, 5]
    assert len(held_out) == 0


def test_a_saved_dataset_is_found_from_the_folder(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    rows = {"input_ids": [[i] * 4 for i in range(5)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"))
    train, held_out = opened(tmp_path, dataset="d")
    assert (len(train), len(held_out)) == (4, 1)
    assert held_out[0]["input_ids"].tolist() == [4, 4, 4, 4]


def test_a_factory_is_found_in_the_folder_and_called(tmp_path, module):
    train, held_out = opened(
        tmp_path, factory=f"{module}:make", arguments={"n": 10}, validation_split=0.3
    )
    assert (len(train), len(held_out)) == (7, 3)
    assert train.rows(np.array([6]))["input_ids"].tolist() == [[6, 6, 6, 6]]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("make_masked", [0, 1, -100, -100]),
        ("make_labelled", [-100] * 4),
    ],
)
def test_tokens_are_their_own_labels_where_there_are_none(tmp_path, module, name, labels):
    for source in opened(tmp_path, factory=f"{module}:{name}", validation_split=0.2):
        assert source.rows(np.array([0]))["labels"].tolist() == [labels]
        assert source.specimen(np.array([0]))["labels"].tolist() == [labels]
        assert source.rows(np.array([], dtype=int))["labels"].shape == (0, 4)


def test_a_stream_of_tokens_has_labels(tmp_path, module):
    train, _ = opened(
        tmp_path, factory=f"{module}:make_generator", arguments={"n": 9}, validation_split=0
    )
    batch = train.rows(np.arange(2))
    assert torch.equal(batch["labels"], batch["input_ids"])


@pytest.mark.parametrize(
    ("name", "task", "says"),
    [
        ("make_nameless", "causal-lm", {"code": "input-ids-missing", "what": "input_ids"}),
        (
            "make_masked",
            "masked-lm",
            {"code": "labels-missing", "what": ("labels", "attention_mask", "input_ids")},
        ),
    ],
)
def test_what_a_language_model_lacks_is_told(tmp_path, module, name, task, says):
    wanted = job(factory=f"{module}:{name}")
    wanted = wanted.model_copy(update={"model": wanted.model.model_copy(update={"task": task})})
    with raises(InputError, **says) as caught:
        open_data(wanted, tmp_path, tmp_path / "cache")
    assert caught.value.where == f"{module}:{name}"


def test_a_factory_may_make_a_source(tmp_path, module):
    train, _ = opened(tmp_path, factory=f"{module}:make_source", arguments={"n": 10})
    assert len(train) == 9


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("mke", {}, {"code": "factory-function-missing", "what": "mke"}),
        ("number", {}, {"code": "factory-function-missing", "what": "number"}),
        ("make", {}, {"code": "factory-arguments-invalid", "what": "n"}),
        ("make", {"n": 3, "m": 3}, {"code": "factory-arguments-invalid", "what": "m"}),
        ("make_set", {"n": 3}, {"code": "sample-not-dict", "what": 0}),
        ("make_generator", {"n": 0}, {"code": "stream-empty"}),
        (
            "make_generator",
            {"n": 9, "length": 5},
            {"code": "sample-not-sequence-length", "what": ("sequence_length", 4)},
        ),
        ("make_generator", {"n": 8}, {"code": "stream-empty-after-split"}),
        ("make", {"n": 0}, {"code": "dataset-empty"}),
        (
            "make",
            {"n": 9, "length": 5},
            {"code": "sample-not-sequence-length", "what": ("sequence_length", 4)},
        ),
    ],
)
def test_what_a_factory_cannot_be(tmp_path, module, name, arguments, says):
    with raises(InputError, **says):
        opened(tmp_path, factory=f"{module}:{name}", arguments=arguments)


@pytest.mark.parametrize("name", ["make_generator", "make_passes"])
def test_a_factory_may_make_a_stream(tmp_path, module, name):
    """Four batches of two are held out, as many as an evaluation takes."""
    factory = f"{module}:{name}"
    train, held_out = opened(tmp_path, factory=factory, arguments={"n": 10})
    assert not len(held_out)  # there is no evaluation
    assert train.in_order and not train.once
    assert train.rows(np.arange(5))["input_ids"][:, 0].tolist() == [8, 9, 8, 9, 8]
    every, none = opened(tmp_path, factory=factory, arguments={"n": 3}, validation_split=0)
    assert every.rows(np.arange(4))["input_ids"][:, 0].tolist() == [0, 1, 2, 0]
    assert not len(none) and every.fingerprint != train.fingerprint
    evaluated = job(factory=factory, arguments={"n": 10})
    evaluated = evaluated.model_copy(update={"eval_steps": 1, "eval_batches": 2})
    train, held_out = open_data(evaluated, tmp_path, tmp_path / "cache", vocabulary=9)
    assert held_out.rows(np.array([3, 0]))["input_ids"].tolist() == [[3] * 4, [0] * 4]
    assert len(held_out) == 4
    with raises(InputError, code="token-outside-vocabulary", what=(9, 0, 8)):
        train.rows(np.array([4, 5]))


def test_near_names_are_offered(tmp_path, module):
    with pytest.raises(InputError) as caught:
        opened(tmp_path, factory=f"{module}:mke")
    assert "make" in caught.value.why
    with raises(InputError, code="factory-module-missing") as caught:
        opened(tmp_path, factory=f"{module}x:make")
    assert module in caught.value.why


@pytest.mark.parametrize("content", ["import no_such_package", "def make(:", "raise ImportError"])
def test_a_module_that_cannot_be_imported_is_named(tmp_path, module, content):
    (tmp_path / f"{module}.py").write_text(content)
    with raises(InputError, code="factory-import-failed", what=module):
        opened(tmp_path, factory=f"{module}:make")


def test_an_error_inside_a_factory_passes_through(tmp_path, module):
    (tmp_path / f"{module}.py").write_text("def make():\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        opened(tmp_path, factory=f"{module}:make")


def test_too_little_data_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcd")
    with raises(InputError, code="no-samples-left-to-train"):
        opened(tmp_path, text=["a.txt"])
