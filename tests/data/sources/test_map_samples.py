"""Any map-style dataset as a source: stacking, and errors that name the sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpumix.data.core.source import Source, split_held_out
from gpumix.data.loader import Loader
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.sources.map_style import SampleSource, as_source
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import every_second


class Squares(torch.utils.data.Dataset):
    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "tensor": torch.full((2, 3), index, dtype=torch.bfloat16),
            "array": np.arange(index, index + 4, dtype=np.int32),
            "whole": index * index,
            "real": 0.5,
            "flag": index % 2 == 0,
            "list": [index, 0],
        }


def test_samples_are_stacked_by_index():
    rows = SampleSource(Squares(), "squares").rows(np.array([7, 2]))
    assert rows["tensor"].shape == (2, 2, 3) and rows["tensor"].dtype == torch.bfloat16
    assert rows["array"].tolist() == [[7, 8, 9, 10], [2, 3, 4, 5]]
    assert rows["array"].dtype == torch.int32
    assert rows["whole"].tolist() == [49, 4] and rows["whole"].dtype == torch.int64
    assert rows["real"].dtype == torch.float32
    assert rows["flag"].tolist() == [False, True]
    assert rows["list"].tolist() == [[7, 0], [2, 0]]


def test_no_rows_keep_dtype_and_shape():
    source = SampleSource(Squares(), "squares")
    some, none = source.rows(np.array([1])), source.rows(np.empty(0, dtype=np.int64))
    for key, value in some.items():
        assert none[key].shape == (0, *value.shape[1:]) and none[key].dtype == value.dtype


def test_one_sample_and_its_bounds():
    source = SampleSource(Squares(), "squares")
    assert len(source) == 10 and source[3]["whole"] == 9
    with pytest.raises(IndexError, match="sample 10 of 10"):
        source[10]


def test_a_dataset_that_fetches_many_at_once_is_asked_that_way():
    class Many(Squares):
        def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
            return [{"whole": -index} for index in indices]

    assert SampleSource(Many(), "many").rows(np.array([4, 5]))["whole"].tolist() == [-4, -5]


def test_a_read_only_array_is_copied_without_a_warning(recwarn):
    array = np.arange(3)
    array.flags.writeable = False
    assert SampleSource([{"a": array}], "x").rows(np.array([0]))["a"].tolist() == [[0, 1, 2]]
    assert not recwarn.list


def test_a_source_is_taken_as_it_is():
    source = SampleSource(Squares(), "squares")
    assert as_source(source) is source
    assert isinstance(as_source(Squares()), Source)


def test_fingerprints_know_name_length_and_shape():
    def mark(samples: list[dict[str, Any]], name: str = "x") -> str:
        return SampleSource(samples, name).fingerprint

    one = mark([{"a": 1}])
    assert mark([{"a": 2}]) == one  # the content may be augmented at random
    assert len({one, mark([{"a": 1}], "y"), mark([{"a": 1}] * 2), mark([{"a": [1]}])}) == 4


RAGGED = {
    "sample-shape-differs": ({"a": [1, 2, 3]}, {"a": [1.0, 2.0]}),
    "sample-keys-differ": ({"b": [1, 2]},),
}


@pytest.mark.parametrize(("code", "sample"), [(k, one) for k in RAGGED for one in RAGGED[k]])
def test_a_sample_that_differs_is_named(code, sample):
    source = SampleSource([{"a": [1, 2]}, {"a": [3, 4]}, sample], "mine:make")
    with raises(InputError, code=code, what=2) as caught:
        source.rows(np.array([0, 2]))
    assert caught.value.where == "mine:make"


@pytest.mark.parametrize("value", ["text", None, [1, [2]], object()])
def test_what_is_no_tensor_is_named(value):
    with raises(InputError, code="sample-value-not-tensor", what=("a", 0)):
        SampleSource([{"a": value}], "mine:make")


@pytest.mark.parametrize(
    ("sample", "what"),
    [((1, 2), "a tuple"), (3, "a int"), (np.zeros(3), "a ndarray"), ({}, "an empty dict")],
)
def test_samples_must_be_dictionaries(sample, what):
    with raises(InputError, code="sample-not-dict", what=(0, what)) as caught:
        SampleSource([sample], "mine:make")
    assert "Loader(collate=...)" in caught.value.fix


class Stream(torch.utils.data.IterableDataset):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"a": 1}] * 3)


@pytest.mark.parametrize("dataset", [iter([{"a": 1}]), Stream(), {1, 2}])
def test_datasets_must_be_map_style(dataset):
    with raises(InputError, code="dataset-not-map-style"):
        as_source(dataset)


@pytest.mark.parametrize("lazy", [False, True])
def test_datasets_by_name_are_refused(lazy):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"x": [1]})
    if lazy:
        both = datasets.IterableDatasetDict({"test": one.to_iterable_dataset()})
    else:
        both = datasets.DatasetDict({"test": one})
    with raises(InputError, code="dataset-of-splits", what=("test", 0)) as refused:
        Loader(both, [1], 0)
    assert "give one: dataset['test']" in refused.value.fix


class Computed:
    """What a model made, without a word that nothing is to be learnt from it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.ones(3, requires_grad=True) * k}


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
def test_batches_do_not_know_how_samples_were_computed(kind, collate):
    with Loader(Computed(), [8], 0, kind=kind, num_workers=2, collate=collate) as loader:
        batches = [next(loader)["x"] for _ in range(3)]
    assert not any(batch.requires_grad for batch in batches)
    assert all(batch.sum().item() == 3 * sum(range(8)) for batch in batches)


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([sample["x"] for sample in samples])}


@pytest.mark.parametrize("collate", [None, stacked])
def test_sparse_tensors_are_refused(collate):
    dataset = [{"x": torch.eye(3).to_sparse()}] * 4
    with raises(InputError, code="sample-tensor-sparse", what="x") as refused:
        Loader(dataset, [2], 0, collate=collate)
    assert refused.value.fix == "make it a dense one: .to_dense()"


@pytest.mark.parametrize("bad_samples", every_second(["stop", "skip"]))
def test_a_collate_may_take_away_from_samples_that_lie_in_memory(bad_samples):
    """As collators of `transformers` do; the dataset gives the same dictionaries again."""

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"k": torch.tensor([sample.pop("k") for sample in samples])}

    dataset = [{"k": k} for k in range(6)]
    with Loader(dataset, [4], 0, collate=collate, bad_samples=bad_samples) as loader:
        found = torch.cat([next(loader)["k"] for _ in range(6)])
    assert found.tolist() == GlobalOrder(6, 0).span(0, 24).tolist()


def test_an_empty_dataset_is_refused():
    with raises(InputError, code="dataset-empty"):
        as_source([])


@pytest.mark.parametrize(
    ("n", "part", "kept"), [(10, 0.0, 0), (10, 0.02, 1), (10, 0.35, 3), (1000, 0.02, 20), (1, 0, 0)]
)
def test_the_end_is_held_out(n, part, kept):
    train, held_out = split_held_out(as_source(Squares(n)), part)
    assert (len(train), len(held_out)) == (n - kept, kept)
    if kept:
        assert held_out[0]["whole"] == (n - kept) ** 2
    assert held_out.rows(np.empty(0, dtype=np.int64))["whole"].shape == (0,)
    assert train.fingerprint != held_out.fingerprint


def test_something_must_be_left_to_train_on():
    with raises(InputError, code="no-samples-left-to-train", what=1):
        split_held_out(as_source(Squares(1)), 0.02)


def test_a_dataset_of_datasets_is_read_as_it_is():
    """Its rows come many at once; their values are lists, or what its format makes of them."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"k": range(30), "pair": [[k, -k] for k in range(30)]})
    order = GlobalOrder(30, 0).span(0, 16).tolist()
    torchs, numpys = rows.with_format("torch"), rows.with_format("numpy")
    for dataset, kind in ((rows, "processes"), (torchs, "threads"), (numpys, "threads")):
        with Loader(dataset, [5, 3], 0, num_workers=2, kind=kind) as loader:
            batches = [next(loader) for _ in range(2)]
        found = torch.cat([batch["k"] for batch in batches]).tolist()
        assert found == order[:5] + order[8:13]
        pairs = torch.cat([batch["pair"] for batch in batches])
        assert pairs.tolist() == [[k, -k] for k in found] and pairs.dtype == torch.int64


@pytest.mark.extended
def test_a_transform_of_datasets_that_draws_draws_for_each_row_by_itself():
    datasets = pytest.importorskip("datasets")

    def noisy(rows: dict[str, list[Any]]) -> dict[str, Any]:
        return {"k": rows["k"], "noise": list(np.random.rand(len(rows["k"])))}

    noised = datasets.Dataset.from_dict({"k": range(30)}).with_transform(noisy)
    found = []
    for cut in ([8], [5, 3]):
        loaders = [Loader(noised, cut, rank, num_workers=2) for rank in range(len(cut))]
        batches = [next(loader) for _ in range(4) for loader in loaders]
        found.append([torch.cat([b[key] for b in batches]).tolist() for key in ("k", "noise")])
        for loader in loaders:
            loader.close()
    assert found[0] == found[1] and len(set(found[0][1])) == 32


def test_keys_of_a_sample_may_be_of_any_types():
    samples = [{"k": k, 1: [k, k], (2, "b"): 0.5} for k in range(6)]
    with Loader(samples, [3], 0) as loader:
        batch = next(loader)
    assert set(batch) == {"k", 1, (2, "b")} and batch[1].tolist() == [[k, k] for k in batch["k"]]
    with Loader(lambda: iter(samples), [3], 0) as loader:
        assert set(next(loader)) == {"k", 1, (2, "b")}
    with raises(InputError, code="sample-keys-differ", what=("k", "b", 1, 3, 0, 2)):
        SampleSource([samples[0], {"k": 1, 3: 1}], "mine").rows(np.arange(2))


def test_the_rows_of_a_data_frame_are_to_be_given():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"k": range(6), "x": 0.5})
    with raises(InputError, code="dataset-indexed-by-column") as caught:
        as_source(frame)
    assert ".to_dict('records')" in caught.value.fix
    assert as_source(frame.to_dict("records"))[4]["k"] == 4


@pytest.mark.parametrize("kind", every_second(["threads", "processes"]))
def test_a_share_of_zero_asks_for_no_samples_at_once(kind):
    class Together(Squares):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            assert indices, "nothing is asked for"
            return [self[k] for k in indices]

    with Loader(Together(), [4, 0], 1, kind=kind, num_workers=2) as loader:
        for _ in range(6):
            assert next(loader)["tensor"].shape == (0, 2, 3)
