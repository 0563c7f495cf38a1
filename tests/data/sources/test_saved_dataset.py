"""Folders of `datasets.save_to_disk`: text, tokens as they are, tokens packed; and their errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpumix.data.core.source import PackedSource, Source
from gpumix.data.core.tokenizer import ByteTokenizer
from gpumix.data.sources.saved_dataset import SavedRows, open_saved
from gpumix.schema.errors import InputError, MachineError
from helpers.errors import raises

END = 256


@pytest.fixture(autouse=True)
def quiet():
    import datasets

    datasets.disable_progress_bars()


def save(folder: Path, **columns: Any) -> Path:
    import datasets

    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    return folder


def opened(folder: Path, *, column: str = "text", length: int = 3) -> Source:
    return open_saved(folder, column, ByteTokenizer(), length, folder.parent / "cache")


def stream(source: Source) -> list[int]:
    return source.rows(np.arange(len(source)))["input_ids"].reshape(-1).tolist()


def test_text_is_packed_once(tmp_path):
    folder = save(tmp_path / "d", body=["ab", "", "cde"])
    source = opened(folder, column="body")
    assert isinstance(source, PackedSource)
    assert stream(source) == [97, 98, END, END, 99, 100]  # the tail is dropped
    (tokens,) = (tmp_path / "cache").glob("*.tokens")
    before = tokens.stat()
    assert opened(folder, column="body").fingerprint == source.fingerprint
    assert tokens.stat() == before


def test_tokens_of_the_right_length_are_read_as_they_are(tmp_path):
    source = opened(save(tmp_path / "d", input_ids=[[1, 2, 3], [4, 5, 6]], other=["x", "y"]))
    assert isinstance(source, SavedRows) and len(source) == 2
    rows = source.rows(np.array([1, 0, 1]))
    assert rows.keys() == {"input_ids", "labels"}
    assert rows["input_ids"].tolist() == [[4, 5, 6], [1, 2, 3], [4, 5, 6]]
    assert rows["input_ids"].dtype == torch.int64
    assert torch.equal(rows["labels"], rows["input_ids"])
    assert source.rows(np.empty(0, dtype=np.int64))["input_ids"].shape == (0, 3)


def test_padding_is_kept_out_of_the_loss(tmp_path):
    folder = save(tmp_path / "d", input_ids=[[1, 2, 0]], attention_mask=[[1, 1, 0]])
    rows = opened(folder).rows(np.array([0]))
    assert rows["labels"].tolist() == [[1, 2, -100]]
    assert rows["attention_mask"].tolist() == [[1, 1, 0]]


def test_labels_of_its_own_are_kept(tmp_path):
    folder = save(tmp_path / "d", input_ids=[[1, 2, 3]], labels=[[-100, 2, 3]])
    assert opened(folder).rows(np.array([0]))["labels"].tolist() == [[-100, 2, 3]]


def test_tokens_of_other_lengths_are_packed(tmp_path):
    ids = [[1, 2], [], [3, END], [4, 5, 6, 7, 8]]
    source = opened(save(tmp_path / "d", input_ids=ids))
    assert isinstance(source, PackedSource)
    assert stream(source) == [1, 2, END, 3, END, 4, 5, 6, 7]


def test_masked_tokens_are_not_packed(tmp_path):
    ids, mask = [[0, 1, 2], [3, 4, 0]], [[0, 1, 1], [1, 1, 0]]
    source = opened(save(tmp_path / "d", input_ids=ids, attention_mask=mask), length=2)
    assert stream(source) == [1, 2, END, 3, 4, END]


def test_an_end_that_is_padding_ends_no_row_and_one_that_is_seen_is_not_doubled(tmp_path):
    ids = [[1, 2, END, END], [3, END, 0, 0], [0, 4, 5, END], [6, 7, 0, 0], [8, 9, 0, 0]]
    mask = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    source = opened(save(tmp_path / "d", input_ids=ids, attention_mask=mask), length=1)
    assert stream(source) == [1, 2, END, 3, END, 4, 5, END, 6, 7, END]


def test_rows_that_were_selected_and_shuffled_keep_their_order(tmp_path):
    import datasets

    whole = datasets.Dataset.from_dict({"input_ids": [[i] * (i + 1) for i in range(9)]})
    whole.select([5, 0, 3]).save_to_disk(str(tmp_path / "d"))
    assert stream(opened(tmp_path / "d", length=1))[:9] == [5] * 6 + [END, 0, END]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"body": ["x"], "title": ["y"]}, {"code": "column-missing", "what": "text"}),
        ({"text": ["abc"], "input_ids": [[1, 2, 3]]}, {"code": "dataset-text-and-tokens"}),
        ({"text": [1, 2]}, {"code": "column-type-wrong", "what": ("text", "int64")}),
        ({"input_ids": [1, 2]}, {"code": "column-type-wrong", "what": "input_ids"}),
        ({"text": ["abc", None]}, {"code": "column-has-null", "what": 1}),
        ({"input_ids": [[1, 2, 3], None]}, {"code": "column-has-null", "what": 0}),
        ({"input_ids": [[1, 2, None]]}, {"code": "column-has-null", "what": 0}),
        ({"input_ids": [[1], [300]]}, {"code": "token-outside-vocabulary", "what": 257}),
        ({"input_ids": [[1], [-1]]}, {"code": "token-outside-vocabulary", "what": 257}),
        ({"input_ids": [[1, 2]], "labels": [[1, 2]]}, {"code": "labels-not-packable"}),
        ({"input_ids": [[1, 2, 3]], "labels": [[1, 2]]}, {"code": "column-length-mismatch"}),
        ({"text": ["a"]}, {"code": "text-shorter-than-sample", "what": (2, 3)}),
        ({"text": []}, {"code": "dataset-not-loadable"}),
    ],
)
def test_unfit_columns_are_refused(tmp_path, columns, says):
    with raises(InputError, **says):
        opened(save(tmp_path / "d", **columns))


def test_the_columns_that_there_are_are_named(tmp_path):
    with pytest.raises(InputError) as caught:
        opened(save(tmp_path / "d", body=["x"], title=["y"]))
    assert caught.value.why == "there is body, title"


def test_a_choice_of_both_is_made_by_name(tmp_path):
    folder = save(tmp_path / "d", text=["abc"], input_ids=[[1, 2, 3]])
    assert stream(opened(folder, column="input_ids")) == [1, 2, 3]


def test_several_splits_are_refused(tmp_path):
    import datasets

    one = datasets.Dataset.from_dict({"text": ["abc"]})
    datasets.DatasetDict(train=one, test=one).save_to_disk(str(tmp_path / "d"))
    with raises(InputError, code="dataset-of-splits", what=("test", "train")) as caught:
        opened(tmp_path / "d")
    assert str(tmp_path / "d" / "test") in caught.value.fix


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_none_is_refused(tmp_path, there):
    folder = tmp_path / "d"
    if there:
        save(folder, text=["abc"])
        (folder / "data-00000-of-00001.arrow").write_bytes(b"broken")
    with raises(InputError, code="dataset-not-loadable") as caught:
        opened(folder)
    assert "save_to_disk" in caught.value.fix


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MachineError) as caught:
        opened(tmp_path)
    assert caught.value.fix.startswith('pip install ".[datasets]"')
