"""Sources that are made of others say of themselves what those say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpumix.data.core.source import Source, SourceSlice, VocabularyCheckedSource
from gpumix.data.sources.map_style import as_source
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.samples.sources import Numbers

SAYS = {  # each unlike what a source says by itself
    "name": "mine:make",
    "splits": False,
    "thread_safe": True,
    "in_order": True,
    "parallel": False,
    "once": True,
}


class Peculiar(Numbers):
    """Is in everything unlike other sources."""

    def __init__(self, n: int = 10) -> None:
        super().__init__(n)
        for key, value in SAYS.items():
            setattr(self, key, value)

    @property
    def lengths(self) -> np.ndarray:
        return np.arange(self.n)

    def specimen(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        return {"k": torch.full((len(indices),), 9)}


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (
            {"input_ids": torch.tensor([1, 32])},
            {"code": "token-outside-vocabulary", "what": (1, 32, 0, 31)},
        ),
        (
            {"labels": torch.tensor([40, -100])},
            {"code": "token-outside-vocabulary", "what": (1, 40, 0, 31)},
        ),
        (
            {"labels": torch.tensor([-1, 3])},
            {"code": "token-outside-vocabulary", "what": (1, -1, 0, 31)},
        ),
    ],
)
def test_what_the_model_does_not_know_is_named(sample, told):
    good = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, -100])}
    with raises(InputError, **told):
        VocabularyCheckedSource(as_source([good, good | sample]), 32).rows(np.arange(2))


@pytest.mark.parametrize(
    ("dtype", "shape", "told"),
    [
        (
            torch.float32,
            (2,),
            {"code": "sample-field-invalid", "what": ("input_ids", 1, "torch.float32")},
        ),
        (
            torch.int64,
            (1, 2),
            {"code": "sample-field-invalid", "what": ("input_ids", 1, "torch.int64", 2)},
        ),
        (
            torch.int64,
            (),
            {"code": "sample-field-invalid", "what": ("input_ids", 1, "torch.int64")},
        ),
    ],
)
def test_what_are_no_tokens_is_named(dtype, shape, told):
    samples = [{"input_ids": torch.zeros(shape, dtype=dtype)}] * 2
    with raises(InputError, **told):
        VocabularyCheckedSource(as_source(samples), 32).rows(np.array([1]))


def test_labels_are_as_many_as_tokens_but_of_a_decoder():
    samples = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1])}]
    with raises(InputError, code="sample-length-mismatch", what=(0, 2, "input_ids", 1)):
        VocabularyCheckedSource(as_source(samples), 32).rows(np.array([0]))
    batch = VocabularyCheckedSource(as_source(samples), 32, aligned=False).rows(np.array([0]))
    assert batch["labels"].tolist() == [[1]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_tokens_of_any_whole_numbers_become_int64(dtype):
    """Also where the vocabulary is larger than the dtype's numbers."""
    samples = [{"input_ids": torch.tensor([1, 100], dtype=dtype)}]
    source = VocabularyCheckedSource(as_source(samples), 50_000)
    for rows in (np.array([0]), np.empty(0, dtype=np.int64)):
        assert source.rows(rows)["input_ids"].dtype == torch.int64
    assert source.rows(np.array([0]))["input_ids"].tolist() == [[1, 100]]


DERIVED = {
    "known tokens": (lambda: VocabularyCheckedSource(Peculiar(), 32), range(10)),
    "a view": (lambda: SourceSlice(Peculiar(), 2, 6), range(2, 6)),
    "a view of known tokens": (
        lambda: SourceSlice(VocabularyCheckedSource(Peculiar(), 32), 2, 6),
        range(2, 6),
    ),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_what_a_source_says_of_itself_holds_for_what_is_made_of_it(kind):
    make, samples = DERIVED[kind]
    source = make()
    assert Source.__annotations__.keys() == SAYS.keys()
    assert {key: getattr(source, key) for key in SAYS} == SAYS
    assert source.specimen(np.arange(2))["k"].tolist() == [9, 9]
    assert source.lengths is not None and source.lengths.tolist() == list(samples)
    assert source.rows(np.arange(len(source)))["k"].tolist() == list(samples)
